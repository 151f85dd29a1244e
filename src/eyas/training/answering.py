"""Who answers: the engine in this process, or any endpoint that speaks OpenAI's protocol."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from eyas.core import RequestError, SamplingParams, UsageError
from eyas.training.conversation import Chat, Messages
from eyas.training.dataset import DataError
from eyas.training.filters import LOOP_TIMES, LOOP_TOKENS

if TYPE_CHECKING:
    import httpx

    from eyas.engine.llm import LLM

AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})  # statuses that may be better soon
LONGEST_WAIT = 60.0
READ_TIMEOUT = 1800.0  # a queue of long answers at a busy server
KEY = "OPENAI_API_KEY"
# vLLM ends an answer there that we would cut before anyway; a third of what SmolLM2 writes greedily comes after it.
ENOUGH = {"min_pattern_size": LOOP_TOKENS, "max_pattern_size": 8 * LOOP_TOKENS, "min_count": LOOP_TIMES}


class Refused(DataError):
    """One prompt cannot be answered; others can."""


@dataclass(frozen=True)
class Prompt:
    """What is to be continued. ``messages`` where it is a conversation that waits for its answer."""

    ids: list[int]
    messages: Messages | None = None


class Answer(NamedTuple):
    """Token ids; where it has ``ended`` by itself, the last one is the token that says so."""

    ids: list[int]
    ended: bool


class Answerer(Protocol):
    trouble: str  # what it is waiting for, empty if nothing

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Answer:
        """Raises Refused for this prompt, DataError or another EyasError where no prompt can be answered any more."""

    async def close(self) -> None: ...


class EngineAnswerer:
    """The embedded engine: many prompts together, with a drafter if there is one."""

    def __init__(self, llm: LLM):
        from eyas.engine.serving import AsyncLLM

        self._llm, self._serving, self.trouble = llm, AsyncLLM(llm), ""

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Answer:
        ids, reason = list[int](), ""
        try:
            async for output in self._serving.stream(self._llm.request(prompt.ids, sampling)):
                ids += [token.token_id for token in output.emitted]
                reason = output.finish_reason or ""
        except RequestError as error:
            raise Refused(str(error)) from error
        return Answer(ids, reason == "stop")

    async def close(self) -> None:
        self._serving.close()


class EndpointAnswerer:
    """A server such as SGLang's or vLLM's. What it can do is found out with one token, before anything long begins.

    Best are token ids both ways: ``/v1/completions`` with a prompt of ids, and ``return_token_ids``. Else text is
    split into tokens here. A server with ``/v1/chat/completions`` only can answer conversations, and write no prompts.
    """

    def __init__(self, url: str, chat: Chat, *, model: str | None = None, concurrency: int = 64, retries: int = 8):
        self._base, self._chat, self._model, self._retries = base_url(url), chat, model, retries
        self._concurrency, self.trouble = concurrency, ""
        self._http: httpx.AsyncClient | None = None
        self._starting = asyncio.Lock()
        self._mode = ""

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Answer:
        async with self._starting:
            if not self._mode:
                await self._start()
        return await self._ask(prompt, sampling, self._mode)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    # What the server can do

    async def _start(self) -> None:
        self._http = _client(self._base, self._concurrency)
        self._model = self._model or await self._only_model()
        ids = self._chat.prompt([{"role": "user", "content": "Hello"}])
        probe = Prompt(ids, [{"role": "user", "content": "Hello"}])
        refusal: Refused | None = None
        for mode in ("ids, loops ended", "ids", "text", "chat"):
            try:
                await self._ask(probe, SamplingParams(max_tokens=4), mode)
            except Refused as error:
                refusal = refusal or error
                continue
            self._mode = mode
            return
        raise DataError(f"{self._base} answers neither completions nor chat completions: {refusal}")

    async def _only_model(self) -> str:
        content = await self._request("GET", "/models", None)
        names = [str(entry.get("id")) for entry in content.get("data") or () if isinstance(entry, Mapping)]
        if len(names) == 1:
            return names[0]
        shown = ", ".join(names[:5]) or "none"
        raise UsageError(f"{self._base} serves {len(names)} models ({shown}): say which with --model.")

    # One prompt

    async def _ask(self, prompt: Prompt, sampling: SamplingParams, mode: str) -> Answer:
        asked: dict[str, Any] = {
            "model": self._model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
        }  # no seed: vLLM then samples requests one by one, and its CPU engine dies where a prompt is read in pieces
        if mode == "chat":
            if prompt.messages is None:
                raise DataError(
                    f"{self._base} has no /v1/completions, so the target cannot write prompts of its own there: give "
                    "it some with --prompts."
                )
            content = await self._request("POST", "/chat/completions", {**asked, "messages": list(prompt.messages)})
        elif mode == "text":
            content = await self._request("POST", "/completions", {**asked, "prompt": self._text(prompt.ids)})
        else:
            more = {"stop_token_ids": list(sampling.stop_token_ids), "return_token_ids": True}
            if mode != "ids":
                more["repetition_detection"] = ENOUGH
            content = await self._request("POST", "/completions", {**asked, **more, "prompt": prompt.ids})
        return self._read(content, prompt)

    def _text(self, ids: list[int]) -> str:
        """Without a token that the server puts in front of every text itself."""
        text, bos = self._chat.decode(ids), self._chat.tokenizer.bos_token or ""
        return text.removeprefix(bos) if bos and self._chat.tokenizer("")["input_ids"] else text

    def _read(self, content: Mapping[str, Any], prompt: Prompt) -> Answer:
        try:
            choice = content["choices"][0]
            text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
            ids, ended = choice.get("token_ids"), choice.get("finish_reason") == "stop"
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise DataError(f"{self._base} sent no completion but {str(content)[:200]}.") from error
        if not ids:
            return Answer(self._chat.answer_ids(prompt.ids, text, ended), ended)
        if not self._mode:
            self._check_tokens(ids, text)
        if ended and ids[-1] not in self._chat.special and self._chat.end_id is not None:
            ids = [*ids, self._chat.end_id]  # some servers leave it out
        return Answer([int(i) for i in ids], ended)

    def _check_tokens(self, ids: Sequence[int], text: str) -> None:
        """The server's tokens mean what they mean here."""
        vocab, here = len(self._chat.tokenizer), self._chat.text(ids)
        if max(ids) >= vocab or here.split() != text.split():
            raise DataError(
                f"{self._base} serves a model with another tokenizer: it says its tokens {list(ids)[:8]} are "
                f"{text[:40]!r}, and for this target they are {here[:40]!r}; name the target that is served."
            )

    # HTTP

    async def _request(self, method: str, path: str, body: Any) -> dict[str, Any]:
        """The reply's JSON. Waits longer and longer where the server cannot answer now; gives up after ``retries``."""
        import httpx

        assert self._http is not None
        for attempt in range(self._retries + 1):
            wait: str | None = None
            try:
                reply = await self._http.request(method, path, json=body)
            except httpx.TransportError as error:
                problem = f"cannot be reached ({type(error).__name__}{f': {error}' if str(error) else ''})"
            else:
                if reply.status_code not in AGAIN:
                    self.trouble = ""
                    return self._content(reply)
                problem, wait = f"answers {reply.status_code}: {reason(reply)}", reply.headers.get("retry-after")
            if attempt < self._retries:
                self.trouble = f"waiting for {self._base}, which {problem}"
                await asyncio.sleep(_pause(attempt, wait))
        raise DataError(
            f"{self._base} {problem}, {self._retries + 1} times. What was made is kept: give the same command again "
            "once it works."
        )

    def _content(self, reply: httpx.Response) -> dict[str, Any]:
        if reply.status_code in (401, 403):
            raise DataError(f"{self._base} wants another key ({reason(reply)}): set {KEY}.")
        if reply.is_error:
            raise Refused(f"{reply.request.url} answers {reply.status_code}: {reason(reply)}")
        try:
            content = reply.json()
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise DataError(f"{reply.request.url} does not speak OpenAI's protocol: it sent {reply.text[:80]!r}.")
        return content


def base_url(url: str) -> str:
    """``http://host:port/v1`` of an address with or without its path."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"--endpoint is an address such as http://127.0.0.1:30000, got {url!r}.")
    path = parts.path.rstrip("/")
    for end in ("/chat/completions", "/completions", "/models"):
        path = path.removesuffix(end)
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


def _client(base: str, concurrency: int) -> httpx.AsyncClient:
    try:
        import httpx
    except ImportError as error:
        raise DataError("Endpoints need httpx: install the extra eyas[train].") from error
    key = os.environ.get(KEY)
    return httpx.AsyncClient(
        base_url=base,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(READ_TIMEOUT, connect=10.0),
        limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        trust_env=urlsplit(base).hostname not in ("127.0.0.1", "localhost", "::1"),  # no proxy on the way to oneself
    )


def _pause(attempt: int, asked: str | None) -> float:
    """Seconds: what the server asked for, else half a second doubled with each attempt; spread, for many wait."""
    try:
        wait = float(asked or "")
    except ValueError:
        wait = 0.5 * 2.0**attempt
    return min(wait, LONGEST_WAIT) * random.uniform(0.75, 1.25)


def reason(reply: httpx.Response) -> str:
    """Why a server refused, in a line."""
    try:
        text = message(reply.json())
    except ValueError:
        text = reply.text
    return " ".join(text.split())[:200] or reply.reason_phrase


def message(content: Any) -> str:
    """Of an OpenAI error object, or whatever came in its place."""
    found = content.get("error", content) if isinstance(content, Mapping) else content
    return str(found.get("message", found) if isinstance(found, Mapping) else found)
