"""What every HTTP request passes before the application sees it: an id, the key, a bounded body, and someone watching
whether its caller is still there."""

from __future__ import annotations

import asyncio
import hmac
import time
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eyas.server.errors import ApiError, error_response, failed
from eyas.server.pages import PAGES
from eyas.server.record import LEFT, Record
from eyas.server.service import Service
from eyas.server.settings import MIB

# need no key; of asking for a token nobody gets more than one at a time, and none where others are answered
OPEN = frozenset(
    {("GET", "/health"), ("GET", "/health_generate"), *((method, page) for page in PAGES for method in ("GET", "HEAD"))}
)
WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
MOST_VALUES = 1 << 20  # in a body, as ``values`` counts: to read many more would keep everybody waiting for seconds
LINGER = 2.0  # seconds in which a refused body may still come: some clients read no answer before they have sent it


class Gate:
    def __init__(self, app: ASGIApp, service: Service):
        self.app, self.service = app, service
        settings = service.settings
        self._key = settings.api_key.encode() if settings.api_key is not None else None
        # a page in a browser here may have its name point to this machine, and so read what it is answered
        guarded = settings.local and settings.api_key is None
        self._hosts = frozenset({"localhost", "127.0.0.1", "::1", settings.host}) if guarded else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        record = Record.of(scope["method"], headers.get("x-request-id", ""))
        scope.setdefault("state", {})["record"] = record
        started = False

        async def answer(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started, record.status = True, message["status"]
                more = [(b"x-request-id", record.id.encode()), (b"x-content-type-options", b"nosniff")]
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)
            record.complete = message["type"] == "http.response.body" and not message.get("more_body")

        caller = Caller(receive)
        try:
            self._check_host(headers.get("host"))
            if (scope["method"], scope["path"]) not in OPEN:
                self._check_key(headers)
            with self.service.counted():
                body = await self._body(scope, headers, caller)
                record.read = time.perf_counter()
                await self._watched(scope, body, caller, answer)
        except Exception as error:
            told = failed(record, error)
            if not started:
                if scope["method"] in WITH_BODY:
                    if "expect" not in headers:
                        await caller.linger()
                    told.headers["Connection"] = "close"  # the rest of a body must not be taken for a request
                await error_response(told)(scope, receive, answer)
        finally:
            record.endpoint = getattr(scope.get("route"), "path", "-")
            self.service.metrics.answered(record.endpoint, record.status)
            record.log()

    async def _body(self, scope: Scope, headers: Headers, caller: Caller) -> bytes:
        """Raises ApiError before reading it where that is of no use."""
        if scope["method"] not in WITH_BODY:
            return b""
        self.service.check_open()
        return await self._read(headers, caller)

    def _check_host(self, host: str | None) -> None:
        if self._hosts is None or host is None:
            return
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name.strip("[]").lower() not in self._hosts:
            raise ApiError(
                403,
                "This server has no API key and answers this machine only, under localhost or its address: give it an "
                "--api-key to reach it under another name.",
                code="host_not_allowed",
            )

    def _check_key(self, headers: Headers) -> None:
        if self._key is None:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip(" \t") if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode("latin-1"), self._key):
            message = "The API key is missing or wrong: send it as Authorization: Bearer KEY."
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _read(self, headers: Headers, caller: Caller) -> bytes:
        if no_body(headers):
            return b""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # other kinds can be sent by any page in a browser, unasked
            raise ApiError(415, "The body must be JSON, sent with Content-Type: application/json.", code="content_type")
        length, most = headers.get("content-length", ""), self.service.settings.max_body_bytes
        if length.isdigit() and int(length) > most:
            raise too_large(most)
        try:
            body = await asyncio.wait_for(caller.body(most), self.service.settings.body_timeout)
        except asyncio.TimeoutError:
            seconds = self.service.settings.body_timeout
            raise ApiError(408, f"The body was not complete after {seconds:g} seconds.", code="timeout") from None
        if (found := values(body)) > MOST_VALUES:
            message = (
                f"The body has up to {found:,} values (lists and objects count as several): {MOST_VALUES:,} are taken."
            )
            raise ApiError(413, message, code="body_too_large")
        return body

    async def _watched(self, scope: Scope, body: bytes, caller: Caller, send: Send) -> None:
        """Runs the application, and stops it where it stands when the caller is gone."""
        app = asyncio.create_task(run(self.app(scope, replay(body), send)))
        watch = asyncio.create_task(caller.gone())
        try:
            await asyncio.wait({app, watch}, return_when=asyncio.FIRST_COMPLETED)
            record = scope["state"]["record"]
            if app.done() or record.complete:  # the end of an answer is a disconnect, too, to ASGI
                await app
            else:
                record.status = LEFT
        finally:
            for task in (app, watch):
                task.cancel()
            await asyncio.gather(app, watch, return_exceptions=True)


async def run(application: object) -> None:
    await application  # type: ignore[misc]  # ASGI says awaitable, a task takes coroutines


def no_body(headers: Headers) -> bool:
    """A page in a browser says its origin with whatever it posts: it must not get past like this."""
    given = {"content-type", "transfer-encoding", "origin"} & {*headers}
    return not given and headers.get("content-length", "0") == "0"


def too_large(most: int) -> ApiError:
    return ApiError(413, f"The body is larger than the {most / MIB:g} MiB that are taken.", code="body_too_large")


def values(body: bytes) -> int:
    """How many JSON values there are at most, before it is read: numbers count once, lists, objects and keys more.

    They take longer to make; a thread would be of no use, since Python's JSON reader lets no other one run meanwhile.
    What text has of these characters is counted too: a million characters of code have less.
    """
    return body.count(b",") + 4 * sum(map(body.count, (b"[", b"{", b":")))


class Caller:
    """What comes from a caller: a body, and at last their going away."""

    def __init__(self, receive: Receive):
        self._receive, self._complete = receive, False

    async def body(self, most: int) -> bytes:
        """Counts what really comes: a chunked body does not say its length, and another may lie."""
        body = bytearray()
        while not self._complete:
            body += await self._next()
            if len(body) > most:
                raise too_large(most)
        return bytes(body)

    async def linger(self) -> None:
        """Takes what is left of a body that nobody wants, for a while."""
        with suppress(asyncio.TimeoutError, ApiError):
            await asyncio.wait_for(self._rest(), LINGER)

    async def gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _rest(self) -> None:
        while not self._complete:
            await self._next()

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "The connection ended before the body did.", code="disconnected")
        self._complete = not message.get("more_body")
        return message.get("body", b"")


def replay(body: bytes) -> Receive:
    """The body once more; after it nothing ever, since somebody else listens for the caller's going away."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    return receive
