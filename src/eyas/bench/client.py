"""A client that times an OpenAI-compatible server: what comes, and when."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from eyas.bench.passes import Answer, BenchError
from eyas.bench.provenance import no_password
from eyas.bench.workload import Prompt
from eyas.core import SamplingParams, UsageError
from eyas.training.answering import message, reason

if TYPE_CHECKING:
    import httpx

KEY = "OPENAI_API_KEY"
SILENCE = 600.0  # seconds without a byte after which a request has failed
FORGET = "/flush_cache", "/reset_prefix_cache"  # SGLang's; vLLM's, in its development mode
TEXTS = ("content", "reasoning_content", "reasoning", "text")


class Endpoint:
    """``root`` is the address without ``/v1``, ``shown`` the same without a password. ``completions``: text to
    /v1/completions, for whoever does not chat.
    """

    def __init__(self, url: str, *, model: str | None = None, completions: bool = False):
        self.root, self.model, self.completions = root_of(url), model, completions
        self.shown = no_password(self.root)
        self._http = _client(self.root)

    async def close(self) -> None:
        await self._http.aclose()

    async def page(self, path: str) -> str | None:
        """What is there; None where nothing is. Raises BenchError where nobody answers."""
        reply = await self._reach("GET", path)
        if reply.status_code in (401, 403) and path == "/v1/models":  # other pages may be kept from everybody
            raise BenchError(f"{self.shown} wants another key ({reason(reply)}): set {KEY}.")
        return None if reply.is_error else reply.text

    async def alive(self) -> bool:
        """Whether anybody is there who has not broken down."""
        try:
            return (await self._reach("GET", "/v1/models")).status_code < 500
        except BenchError:
            return False

    async def forget(self) -> bool:
        """Empties the server's prefix cache; False where it has no way to. Raises BenchError where nobody answers."""
        for path in FORGET:
            for _ in range(3):
                status = (await self._reach("POST", path)).status_code
                if status != 400:
                    break
                await asyncio.sleep(0.2)  # SGLang refuses as long as a request is ending
            if status < 300:
                return True
        return False

    async def post(self, path: str, body: Mapping[str, Any] | None, seconds: float) -> tuple[int, str]:
        """The status and the text of the answer. Raises BenchError where nobody answers within so many seconds."""
        reply = await self._reach("POST", path, body, seconds)
        return reply.status_code, reply.text

    async def _reach(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, seconds: float = 30.0
    ) -> httpx.Response:
        import httpx

        time_out = httpx.Timeout(seconds, connect=10.0)
        try:
            return await self._http.request(method, self.root + path, json=body, timeout=time_out)
        except httpx.HTTPError as error:
            raise BenchError(f"{self.shown} cannot be reached ({_what(error)}): is the server running?") from error

    async def json(self, path: str) -> dict[str, Any] | None:
        """The same, where it is a JSON object."""
        try:
            content = json.loads(await self.page(path) or "null")
        except ValueError:
            return None
        return content if isinstance(content, dict) else None

    async def models(self) -> list[dict[str, Any]]:
        listed = (await self.json("/v1/models") or {}).get("data")
        return [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []

    async def ask(self, prompt: Prompt, sampling: SamplingParams, seed: int | None = None) -> Answer:
        """Never raises for a request that fails: the answer says why."""
        import httpx

        events: list[tuple[float, str]] = []
        begin = time.perf_counter()
        try:
            async with self._http.stream("POST", self._path, json=self._body(prompt, sampling, seed)) as reply:
                streamed = "event-stream" in reply.headers.get("content-type", "")
                if reply.is_error or not streamed:
                    await reply.aread()
                    return self._whole(prompt, reply, time.perf_counter() - begin)
                async for line in reply.aiter_lines():
                    if line.startswith("data:"):  # read later: the clock is running
                        events.append((time.perf_counter() - begin, line[5:].strip()))
        except httpx.HTTPError as error:
            return Answer(prompt.key, total=time.perf_counter() - begin, error=_what(error), lost=True)
        return _streamed(prompt, events)

    async def choices(self, prompt: Prompt, sampling: SamplingParams) -> list[tuple[str, float]]:
        """The tokens of an answer, each with how much likelier it was than the next one (log-probabilities)."""
        import httpx

        asked = self._body(prompt, sampling, None) | {"stream": False}
        del asked["stream_options"]
        asked |= {"logprobs": 2} if self.completions else {"logprobs": True, "top_logprobs": 2}
        try:
            content = (await self._http.post(self._path, json=asked)).json()
            said = content["choices"][0]["logprobs"]
            if self.completions:
                tops = [sorted(top.values(), reverse=True) for top in said["top_logprobs"]]
                return [(t, top[0] - top[1]) for t, top in zip(said["tokens"], tops, strict=True) if len(top) > 1]
            return [
                (one["token"], one["top_logprobs"][0]["logprob"] - one["top_logprobs"][1]["logprob"])
                for one in said["content"]
            ]
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise BenchError(f"{self.shown} gives no log-probabilities") from error

    @property
    def _path(self) -> str:
        return f"{self.root}/v1/{'completions' if self.completions else 'chat/completions'}"

    def _body(self, prompt: Prompt, sampling: SamplingParams, seed: int | None) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {"prompt": prompt.text} if self.completions else {"messages": list(prompt.messages)}
        given = {"top_k": sampling.top_k or None, "ignore_eos": sampling.ignore_eos or None, "seed": seed}
        return body | {name: value for name, value in given.items() if value is not None}

    def _whole(self, prompt: Prompt, reply: httpx.Response, seconds: float) -> Answer:
        """An error, or the answer of a server that does not stream."""
        if reply.is_error:
            return Answer(prompt.key, total=seconds, error=f"HTTP {reply.status_code}: {reason(reply)}")
        try:
            content = reply.json()
            choice, tokens = content["choices"][0], int(content["usage"]["completion_tokens"])
        except (ValueError, KeyError, IndexError, TypeError):
            return Answer(prompt.key, total=seconds, error=f"no completion but {reply.text[:80]!r}")
        return Answer(
            prompt.key,
            total=seconds,
            tokens=tokens,
            prompt_tokens=content["usage"].get("prompt_tokens"),
            text=_text(choice.get("message", choice)),
            finish=str(choice.get("finish_reason")),
            said=_said(content, choice),
        )


def _streamed(prompt: Prompt, events: Sequence[tuple[float, str]]) -> Answer:
    """The answer that these events are."""
    times, texts, usage, finish, said = list[float](), list[str](), dict[str, Any](), "", dict[str, Any]()
    end = 0.0
    for at, data in events:
        if data == "[DONE]":
            continue
        try:
            content = json.loads(data)
            choices = content.get("choices") or []
        except (ValueError, AttributeError):
            return Answer(prompt.key, total=at, error=f"no event but {data[:80]!r}")
        if content.get("error"):
            return Answer(prompt.key, total=at, error=f"in the stream: {message(content)}")
        usage = content.get("usage") or usage
        for choice in choices:
            if text := _text(choice.get("delta") or choice):
                times.append(at)
                texts.append(text)
            end, finish = at, choice.get("finish_reason") or finish
            said |= _said(content, choice)
        said |= _said(content, {})
    if not finish:
        return Answer(prompt.key, total=events[-1][0] if events else 0.0, error="the stream broke off", lost=True)
    if not isinstance(usage.get("completion_tokens"), int):
        return Answer(prompt.key, total=end, error="no usage at the stream's end, so tokens cannot be counted")
    return Answer(
        prompt.key,
        first=times[0] if times else end,
        total=end,  # the last token may have no text of its own
        gaps=tuple(after - before for before, after in pairwise(times)),
        tokens=usage["completion_tokens"],
        prompt_tokens=usage.get("prompt_tokens"),
        text="".join(texts),
        finish=finish,
        said=said,
    )


def _said(content: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    """What some servers say about the drafts of a request: Eyas in its usage, vLLM and SGLang when asked for it."""
    places = {
        "speculative": (content.get("usage") or {}).get("speculative"),
        "metrics": content.get("metrics"),
        "meta_info": choice.get("meta_info"),
    }
    return {name: value for name, value in places.items() if isinstance(value, Mapping)}


def _text(part: Mapping[str, Any]) -> str:
    return "".join(part[name] for name in TEXTS if isinstance(part.get(name), str))


def root_of(url: str) -> str:
    """``http://host:port`` of an address with or without ``/v1`` and what may come behind it."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"An endpoint is an address such as http://127.0.0.1:30000, got {url!r}.")
    path = parts.path.rstrip("/")
    for end in ("/chat/completions", "/completions", "/models", "/v1"):
        path = path.removesuffix(end)
    return f"{parts.scheme}://{parts.netloc}{path}"


def local(root: str) -> bool:
    return urlsplit(root).hostname in ("127.0.0.1", "localhost", "::1")


def _client(root: str) -> httpx.AsyncClient:
    import httpx

    key = os.environ.get(KEY)
    return httpx.AsyncClient(
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(SILENCE, connect=10.0),
        # The load decides how many; and servers of uvicorn's close idle ones after 5 seconds, just when they are used.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
        trust_env=not local(root),  # no proxy on the way to oneself
    )


def _what(error: Exception) -> str:
    return f"{type(error).__name__}{f': {error}' if str(error) else ''}"
