"""Small OpenAI-compatible servers on loopback that stream, fail, die or boast as they are told."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

WORDS = ("owl", "kite", "heron", "swift", "finch", "raven", "robin", "crane")


def said(prompt: str, count: int) -> list[str]:
    """The answer to a prompt: words that depend on nothing else."""
    return [WORDS[(len(prompt) + 3 * n + n * n) % len(WORDS)] + " " for n in range(count)]


@dataclass
class Server:
    """``pause`` seconds for each step, which yields ``burst`` tokens. Counts as vLLM does where ``metrics``."""

    pause: float = 0.002
    burst: int = 1
    metrics: bool = True
    streams: bool = True
    usage: bool = True
    names: tuple[str, ...] = ("m",)
    card: dict[str, Any] = field(
        default_factory=lambda: {"owned_by": "vllm", "root": "/models/m", "max_model_len": 4096}
    )
    info: dict[str, Any] | None = None
    says: dict[str, Any] = field(default_factory=dict)  # added to the usage
    faults: list[int] = field(default_factory=list)  # statuses of the next requests
    dies_at: int | None = None  # this request breaks off, and the server is gone
    other_text: str = ""  # put before every answer
    chats: bool = True
    forgets: str = ""  # the page that empties its prefix cache
    forgotten: int = 0
    closed: tuple[str, ...] = ()  # pages that want a key
    asked: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    tokens: int = 0
    steps: int = 0
    begun: int = 0  # requests that have got a token
    port: int = 0
    dead: bool = False
    uvicorn: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def gate(request: Request, go_on: Any) -> Response:
            if request.url.path in self.closed:
                return JSONResponse({"error": {"message": "who are you?"}}, 401)
            if request.method == "POST" and request.url.path == self.forgets:
                self.forgotten += 1
                return PlainTextResponse("done")
            return await go_on(request)

        @app.get("/v1/models")
        def models() -> Any:
            if self.dead:
                return JSONResponse({}, 503)
            return {"object": "list", "data": [{"id": name, **self.card} for name in self.names]}

        @app.get("/server_info")
        def server_info() -> Response:
            return JSONResponse(self.info) if self.info is not None else JSONResponse({"detail": "no"}, 404)

        @app.get("/metrics")
        def metrics() -> Response:
            return PlainTextResponse(self.page()) if self.metrics else PlainTextResponse("", 404)

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            body = await request.json()
            if not self.chats:
                return JSONResponse({"error": {"message": "no chat template"}}, 400)
            return await self.answer(body, "".join(m["content"] for m in body["messages"]), chat=True)

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            body = await request.json()
            return await self.answer(body, body["prompt"], chat=False)

        return app

    def page(self) -> str:
        lines = [
            "# TYPE vllm:generation_tokens_total counter",
            f'vllm:generation_tokens_total{{model_name="m"}} {self.tokens}',
            f'vllm:time_to_first_token_seconds_count{{model_name="m"}} {self.begun}',
        ]
        if self.burst > 1:
            counts = {
                "drafts": self.steps,
                "draft_tokens": self.steps * (self.burst - 1),
                "accepted_tokens": self.steps * (self.burst - 1),
            }
            for name, value in counts.items():
                lines.append(f'vllm:spec_decode_num_{name}_total{{model_name="m"}} {value}')
            for place in range(self.burst - 1):
                where = f'{{model_name="m",position="{place}"}}'
                lines.append(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{where} {self.steps}")
        return "\n".join(lines) + "\n"

    async def answer(self, body: dict[str, Any], prompt: str, *, chat: bool) -> Response:
        self.asked.append(body)
        if self.faults:
            return JSONResponse({"error": {"message": "as told"}}, self.faults.pop(0))
        count = body["max_tokens"]
        words = said(prompt, count)
        if self.other_text:
            words[0] = self.other_text
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": count} | self.says
        if not self.streams or not body.get("stream"):
            await asyncio.sleep(self.pause * count / self.burst)
            self.tokens += count
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
            choice |= {"message": {"content": "".join(words)}} if chat else {"text": "".join(words)}
            if body.get("logprobs") and chat:
                tops = [{"logprob": -0.1}, {"logprob": -0.35}]
                choice["logprobs"] = {"content": [{"token": word, "top_logprobs": tops} for word in words]}
            return JSONResponse({"choices": [choice], "usage": usage})
        return StreamingResponse(self.stream(words, usage, chat=chat), media_type="text/event-stream")

    async def stream(self, words: list[str], usage: dict[str, Any], *, chat: bool) -> AsyncIterator[str]:
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        dying = self.dies_at is not None and len(self.asked) >= self.dies_at
        try:
            if chat:
                yield event({"delta": {"role": "assistant", "content": ""}})
            for place in range(0, len(words), self.burst):
                await asyncio.sleep(self.pause)
                if dying and place >= len(words) // 2:
                    self.uvicorn.should_exit = self.uvicorn.force_exit = self.dead = True
                    raise RuntimeError("killed")
                text = "".join(words[place : place + self.burst])
                self.steps += place > 0
                self.begun += place == 0
                yield event({"delta": {"content": text}} if chat else {"text": text})
            self.tokens += len(words)
            yield event({"delta": {}, "finish_reason": "length"} if chat else {"text": "", "finish_reason": "length"})
            if self.usage:
                yield "data: " + json.dumps({"choices": [], "usage": usage}) + "\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1


def event(choice: dict[str, Any]) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, **choice}]}) + "\n\n"


@contextmanager
def serving(server: Server, port: int = 0) -> Iterator[Server]:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", port))
    server.port = held.getsockname()[1]
    server.uvicorn = uvicorn.Server(uvicorn.Config(server.app(), log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.uvicorn.run, kwargs={"sockets": [held]}, daemon=True)
    thread.start()
    while not server.uvicorn.started:
        time.sleep(0.005)
    try:
        yield server
    finally:
        server.uvicorn.should_exit = server.uvicorn.force_exit = True
        thread.join(10)
        held.close()
