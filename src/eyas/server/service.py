"""The engine as the server sees it: loading, ready or draining; who is let in; many answers as one stream."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from eyas.core import EyasError, Request, RequestError, SamplingParams
from eyas.engine.serving import AsyncLLM
from eyas.server.errors import ApiError, api_error, later, refused
from eyas.server.metrics import Metrics, Snapshot
from eyas.server.parameters import default_sampling
from eyas.server.prompts import Encoder
from eyas.server.record import Record
from eyas.server.settings import Settings

if TYPE_CHECKING:  # torch is imported by what loads the target, behind the open port
    from eyas.engine.llm import LLM
    from eyas.engine.sequence import Output

A = TypeVar("A")
T = TypeVar("T")
News: TypeAlias = "tuple[int, Output]"
ALIVE = 20.0  # seconds in which an engine that works makes a token; SGLang's


class Service:
    """Belongs to one event loop. Until ``open`` and from ``drain`` on, everybody is told to come back later."""

    def __init__(self, settings: Settings):
        self.settings, self.metrics = settings, Metrics()
        self.status: Literal["loading", "ready", "draining"] = "loading"
        self.began = int(time.time())
        self.open_requests = 0  # HTTP requests that were let in and are being answered
        self.in_flight = 0  # answers that are being made or wait
        self.image_bytes = 0  # of the images that they see
        self._inboxes: set[asyncio.Queue[News | Exception]] = set()  # of those who wait for what the engine makes
        self._engine: AsyncLLM | None = None
        self._heard = 0.0  # when the engine made its last token
        self._asking: asyncio.Task[Exception | None] | None = None  # for a token, to see whether one comes
        self._threads = ThreadPoolExecutor(1, "eyas-encode")  # one: a tokenizer is not for several at a time

    def open(self, llm: LLM) -> None:
        """The target is there: from now on requests are answered."""
        self.encoder = Encoder(llm)
        self.defaults = default_sampling(llm.target.model) if self.settings.model_defaults else {}
        self.places = llm.engine.scheduler.max_running + self.settings.max_queued_requests
        self._free = asyncio.Semaphore(self.places)  # first come, first served
        self._engine, self.status = AsyncLLM(llm), "ready"

    async def drain(self, timeout: float) -> None:
        """Lets nobody in any more, waits for those who are there, and tells those who are still there after that.

        Ends with the step that is running then: who cannot wait for it cancels this.
        """
        self.status = "draining"
        deadline = time.monotonic() + timeout
        while self.open_requests and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._engine is not None:
            self._engine.close(wait=False)
        for inbox in self._inboxes:  # the engine would say so, too, but only behind its step
            inbox.put_nowait(self._gone())
        while not self.ended:
            await asyncio.sleep(0.02)
        self._threads.shutdown(wait=False)

    @property
    def ended(self) -> bool:
        """Whether no step is running any more, nor will be."""
        return self._engine is None or self._engine.ended

    @contextmanager
    def counted(self) -> Iterator[None]:
        self.open_requests += 1
        try:
            yield
        finally:
            self.open_requests -= 1

    @property
    def engine(self) -> AsyncLLM:
        """Raises ApiError where requests cannot be answered (yet, or any more)."""
        if self.status == "loading":
            raise later(503, "The target is still being loaded: try again in a few seconds.", "loading", 5)
        if self._engine is None or self.status == "draining" or self._engine.closed:
            raise self._gone()
        return self._engine

    def _gone(self) -> ApiError:
        if self.status == "draining":
            message = "The server is shutting down: ask another one, or this one once it is back."
            return later(503, message, "draining", 30)
        return later(503, "The engine has stopped: the server must be started anew.", "engine_stopped", 60)

    @property
    def llm(self) -> LLM:
        return self.engine.llm

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that is not the one served; a request need not name one."""
        if name is not None and name != self.settings.model_name:
            message = f"The model {name[:200]!r} is not served here: {self.settings.model_name!r} is."
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_open(self, answers: int = 1) -> AsyncLLM:
        """The engine. Raises ApiError where so many more answers cannot be taken on."""
        engine = self.engine
        self._check_room(answers)
        return engine

    def _check_room(self, answers: int) -> None:
        """One free place is enough: what does not fit yet waits ahead of all who come later.

        Were all places needed at once, who asks for one would always be there before who asks for many.
        """
        if answers > self.places:
            raise refused(
                None, f"A request for {answers} answers is too much: {self.places} can be in the queue in all."
            )
        most = 2 * self.places  # requests: some wait for the tokenizer, and some read slowly what is finished
        if self.in_flight >= self.places:
            full = f"{self.in_flight} answers are running or waiting, and no more are taken from {self.places} on"
        elif self.open_requests > most:
            full = f"{self.open_requests} requests are being read or answered, {most} can be"
        else:
            return
        raise later(429, f"{full}; try again in a moment.", "queue_full", 1)

    async def encode(self, engine: AsyncLLM, function: Callable[[A], T], asked: A) -> T:
        """Runs something that would keep everybody else waiting. Raises ApiError where the engine ends before it."""

        def work() -> T:
            if engine.closed:
                raise self._gone()
            return function(asked)

        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def snapshot(self) -> Snapshot | None:
        """The engine's state, None where there is no engine (yet, or any more)."""
        if self._engine is None or self._engine.closed:
            return None
        engine = self._engine.llm.engine
        return await self._engine.call(lambda: Snapshot.of(engine))

    async def alive(self) -> None:
        """Waits for a token: anybody's, or where nobody is answered, one that all who wait here have asked for.

        Raises ApiError where none comes.
        """
        begin, asking = time.perf_counter(), None
        while self._heard < begin:
            engine = self.engine
            if asking is None and not self.in_flight:
                if self._asking is None or self._asking.done():
                    self._asking = asyncio.create_task(self._one_token(engine))
                asking = self._asking
            if asking is not None and asking.done() and (error := asking.result()):
                raise later(503, f"The engine makes no token: {api_error(error)}", "no_token", 5) from error
            if time.perf_counter() > begin + ALIVE:
                raise later(503, f"The engine has made no token for {ALIVE:g} seconds.", "no_token", 5)
            await asyncio.sleep(0.02)

    async def _one_token(self, engine: AsyncLLM) -> Exception | None:
        request = Request(f"alive-{uuid.uuid4().hex}", [0], SamplingParams(max_tokens=1), speculate=False)
        try:
            async with aclosing(engine.stream(request)) as outputs:
                async for _ in outputs:
                    self._heard = time.perf_counter()
        except Exception as error:
            return error
        return None

    async def forget(self) -> None:
        """Empties the prefix cache. Raises ApiError while anything is being answered: that would fill it anew."""
        engine = self.engine.llm.engine

        def work() -> bool:
            if engine.idle:
                engine.forget()
            return engine.idle

        if not await self.engine.call(work):
            message = "The prefix cache is emptied only while nothing is being answered: try again in a moment."
            raise later(400, message, "not_idle", 1)

    async def answer(self, engine: AsyncLLM, requests: Sequence[Request], record: Record) -> AsyncGenerator[News, None]:
        """Yields what becomes of ``requests``, each by its number. Who leaves frees what they held at once.

        Raises ApiError where there is no room for them; any other error ends them all.
        """
        self._check_room(len(requests))
        images = requests[0].images or {}  # only chats have any: all answers are to one prompt
        size = sum(image.nbytes for image in images.values())
        if size and self.image_bytes >= self.settings.max_image_bytes:  # as with places: some room is enough
            raise later(429, "Too many images are waiting to be seen: try again in a moment.", "queue_full", 1)
        inbox: asyncio.Queue[News | Exception] = asyncio.Queue()
        self._inboxes.add(inbox)
        self.in_flight += len(requests)
        self.image_bytes += size
        tasks = [asyncio.create_task(self._pump(engine, *pair, inbox, record)) for pair in enumerate(requests)]
        for task in tasks:  # even if it is cancelled before it has begun; not when a slow reader has read all
            task.add_done_callback(self._leave)
        try:
            unfinished = len(tasks)
            while unfinished:
                news = await inbox.get()
                if isinstance(news, Exception):
                    raise news
                yield news
                unfinished -= news[1].finish_reason is not None
        finally:
            self._inboxes.discard(inbox)
            self.image_bytes -= size
            for task in tasks:
                task.cancel()

    def _leave(self, task: asyncio.Task) -> None:
        self.in_flight -= 1

    async def _pump(
        self, engine: AsyncLLM, number: int, request: Request, inbox: asyncio.Queue, record: Record
    ) -> None:
        last, first = record.read, True
        try:
            async with self._free, aclosing(engine.stream(request)) as outputs:
                async for output in outputs:
                    now = self._heard = time.perf_counter()
                    record.first = record.first or now
                    record.completion_tokens += len(output.emitted)
                    self.metrics.heard(output, now - last, first)
                    if output.finish_reason is not None:
                        self.metrics.finished(output, len(request.prompt_ids), now - record.read)
                    inbox.put_nowait((number, output))
                    last, first = now, False
        except Exception as error:
            ended = engine.closed and isinstance(error, EyasError) and not isinstance(error, RequestError)
            inbox.put_nowait(self._gone() if ended else error)
