"""A server that really listens, in a thread of this process, over a tiny target; and plain decoding to compare with."""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import httpx
import openai
import zoo
from cli import tiny
from engine.harness import TREE, random_drafter

from eyas.core import SamplingParams
from eyas.engine.llm import LLM, Completion
from eyas.server.lifecycle import Stop, address, listening, run
from eyas.server.service import Service
from eyas.server.settings import Settings
from eyas.target.adapter import HFTarget

NAME = "llama"
MODEL = "tiny"
CONTEXT = 256
PATIENCE = 60  # seconds
UNUSED = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # every client would load all certificates anew


@cache
def tokenizer() -> Any:
    return tiny.tokenizer()


@cache
def target(whose: str) -> HFTarget:
    """A model for each thread: two cannot use one at the same time."""
    return HFTarget(zoo.case(NAME).build())


def model(**settings: Any) -> LLM:
    drafter = random_drafter(NAME)
    defaults = {"drafter": drafter, "shape": TREE, "speculation": "fixed", "max_running_requests": 4}
    defaults["context_length"] = CONTEXT
    made = HFTarget(zoo.case(NAME).build())
    return LLM(made, tiny.tokenizer(), **{**defaults, **settings})


def plainly(prompt: Any, sampling: SamplingParams) -> Completion:
    """What the target says without any server, drafter or batch."""
    return LLM(target("here"), tokenizer(), context_length=CONTEXT).generate(prompt, sampling)


class Live:
    """``load`` runs in the server's loading thread; ``ready`` waits for it."""

    def __init__(self, load: Callable[[], LLM] = model, *, ready: bool = True, **settings: Any):
        self.settings = Settings(**{"model_name": MODEL, "port": 0, "drain_timeout": 5.0, **settings})
        self.service = Service(self.settings)
        self.stop, self.finished, self.failure = Stop(), None, None
        self.status: int | None = None
        self._socket = listening("127.0.0.1", 0)
        self.url = address(self._socket)
        self._client = self.http()
        self.loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, args=(load,), daemon=True)
        self._thread.start()
        wait_for(lambda: self.loop is not None)
        if ready:
            wait_for(lambda: self.service.status != "loading" or not self._thread.is_alive())

    def _run(self, load: Callable[[], LLM]) -> None:
        async def job() -> None:
            self.loop = asyncio.get_running_loop()
            self.status = await run(self.service, load, self._socket, self.stop)
            self.finished = self.status is None

        try:
            asyncio.run(job())
        except BaseException as error:
            self.failure = error

    def tell_to_end(self) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.stop)

    def ended(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the server does not end"

    def close(self) -> None:
        if self._thread.is_alive():
            self.tell_to_end()
        self.ended()
        if self.failure is not None:
            raise self.failure

    @property
    def engine(self) -> Any:
        assert self.service._engine is not None
        return self.service._engine

    def state(self) -> tuple[int, int, int]:
        """Answers running and waiting in the engine, and answers the server has on its books."""
        future = asyncio.run_coroutine_threadsafe(self.service.snapshot(), self.loop)  # type: ignore[arg-type]
        seen = future.result(PATIENCE)
        assert seen is not None
        return seen.running, seen.waiting, self.service.in_flight

    def http(self, **settings: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False, verify=UNUSED, **settings)

    def openai(self, **settings: Any) -> openai.OpenAI:
        defaults = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE}
        return openai.OpenAI(base_url=f"{self.url}/v1", http_client=self._client, **{**defaults, **settings})

    def post(self, path: str, **settings: Any) -> httpx.Response:
        return self._client.post(path, **settings)

    def get(self, path: str, **settings: Any) -> httpx.Response:
        return self._client.get(path, **settings)


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


chat = partial(dict, model=MODEL, messages=[{"role": "user", "content": "w5 w9 w77"}], max_tokens=12, seed=3)
completion = partial(dict, model=MODEL, prompt="w5 w9 w77", max_tokens=12, seed=3)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED = [{"role": "user", "content": "w5 w9 w77"}]
