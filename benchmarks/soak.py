"""Thousands of callers, good and bad, at one live ``eyas serve``: nothing lost, mixed up or leaked.

    python benchmarks/soak.py [--requests 2000] [--concurrency 64] [--model tiny|smollm2|FOLDER] [--drafter FOLDER]
                              [--seed 0] [--limit 1800] [--out FILE]

Callers chat and complete, greedily and with seeds, whole and streamed, with one answer or several; others leave in the
middle of a stream, die with half a request sent, send nonsense, have the wrong key, or only look around. Every answer
that is complete must be the text that the target says alone, decoded plainly in this process. At the end nothing may be
open, memory must have stopped growing, and the server must end as an operator asks it to. Everything stays on this
machine. Exit status 1, and why, otherwise. ``tiny`` is a random model of the tests: its answers are only compared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from servers import ServerProcess

from eyas.bench.benchmark import write

HERE = Path(__file__).resolve().parent
KEY = "soak"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KINDS = {  # of callers, and how many of a hundred are such
    "whole": 26,
    "stream": 26,
    "leaves a stream": 14,
    "dies": 10,
    "dies sending": 4,
    "sends nonsense": 9,
    "wrong key": 4,
    "looks around": 7,
}
PATIENCE = 120.0  # seconds in which any answer must be complete
TRIES = 200  # of a caller who is told to come later
GROWTH_MIB = 8.0  # by which resident memory may grow in the second half, by a line through its samples
SETTINGS = (  # how answers are chosen
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5},
    {"temperature": 1.2, "top_k": 20, "repetition_penalty": 1.1},
)
NONSENSE = (
    b"",
    b"{",
    b"[]",
    b"\xff\xfe",
    b"[" * 3000,
    b'{"messages": 5}',
    b'{"prompt": {}}',
    b'{"messages": [], "prompt": []}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}], "prompt": "\\ud800"}',
    b'{"messages": [{"role": "user", "content": "w5"}], "prompt": "w5", "temperature": "hot"}',
    b'{"messages": [{"role": "user", "content": "w5"}], "prompt": "w5", "n": 0}',
    b'{"messages": [{"role": "user", "content": "w5"}], "prompt": "w5", "logit_bias": {"99999999": 1}}',
    b'{"messages": [{"role": "user", "content": "w5"}], "prompt": "w5", "zzz": true}',
    b'{"messages": [{"role": "user", "content": "w5"}], "prompt": "w5", "model": "another"}',
)


@dataclass(frozen=True)
class Case:
    """A request, and what the target says to it alone: one text for each of its answers."""

    path: str
    body: Mapping[str, Any]
    texts: tuple[str, ...]
    finishes: tuple[str, ...]
    tokens: int


@dataclass
class Answer:
    """A response as it came; ``ended``: all of it is there."""

    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    tokens: int | None = None
    ended: bool = False


@dataclass
class Report:
    requests: int
    callers: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    compared: int = 0  # answers that were complete, each held against the truth
    seconds: float = 0.0
    memory: list[tuple[float, float]] = field(default_factory=list)  # (seconds, MiB)
    files: list[int] = field(default_factory=list)  # open in the server: before, and at the end
    growth: float = 0.0  # MiB in the second half
    problems: list[str] = field(default_factory=list)


def complaint(case: Case, answer: Answer) -> str | None:
    """What is wrong with a complete answer; None where nothing is."""
    asked = f"{case.path} {json.dumps(case.body)[:300]}"
    if not answer.ended:
        return f"broke off: {asked}"
    for number, (text, finish) in enumerate(zip(case.texts, case.finishes, strict=True)):
        if answer.texts.get(number, "") != text:
            return f"another text at {number}: {answer.texts.get(number)!r} instead of {text!r}: {asked}"
        if answer.finishes.get(number) != finish:
            return f"ended by {answer.finishes.get(number)!r} instead of {finish!r} at {number}: {asked}"
    if answer.tokens != case.tokens:
        return f"{answer.tokens} tokens are counted instead of {case.tokens}: {asked}"
    return None


class Soak:
    """``cases`` are asked of the server at ``url`` over and over, at most ``concurrency`` at a time."""

    def __init__(self, url: str, pid: int, cases: Sequence[Case], requests: int, concurrency: int, seed: int):
        self.url, self.pid, self.cases, self.concurrency, self.seed = url, pid, cases, concurrency, seed
        self.report = Report(requests)
        self._numbers = iter(range(requests))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)
        headers = {"Authorization": f"Bearer {KEY}"}
        timeout = httpx.Timeout(PATIENCE)
        self._http = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=False, verify=False
        )

    async def run(self, limit: float) -> Report:
        begin = time.monotonic()
        self.report.files.append(self._open_files())
        sampling = asyncio.create_task(self._sample(begin))
        try:
            async with self._http:
                work = asyncio.gather(*(self._caller() for _ in range(self.concurrency)))
                await asyncio.wait_for(work, limit)
                self.report.seconds = time.monotonic() - begin
                await self._check_idle()
                await self._check_alone()
            await self._check_files()
        except asyncio.TimeoutError:
            self.report.problems.append(f"not done after {limit:.0f} s: somebody waits for ever, or it is just slow")
        finally:
            sampling.cancel()
        self.report.growth = growth([s for s in self.report.memory if s[0] <= self.report.seconds])
        if self.report.growth > GROWTH_MIB:
            self.report.problems.append(f"memory grew by {self.report.growth:.1f} MiB in the second half")
        return self.report

    async def _caller(self) -> None:
        for number in self._numbers:
            draw = random.Random(f"{self.seed} {number}")
            (kind,) = draw.choices([*KINDS], [*KINDS.values()])
            self.report.callers[kind] += 1
            if number and not number % 250:
                print(f"{number} requests", file=sys.stderr, flush=True)
            try:
                problem = await getattr(self, f"_{kind.replace(' ', '_')}")(draw, draw.choice(self.cases))
            except (httpx.HTTPError, OSError, ValueError, KeyError, IndexError, asyncio.TimeoutError) as error:
                problem = f"{type(error).__name__}: {error}"
            if problem:
                self.report.problems.append(f"request {number}, who {kind}: {problem}")

    # Callers, each of whom returns what is wrong

    async def _whole(self, draw: random.Random, case: Case) -> str | None:
        for _ in range(TRIES):
            reply = await self._http.post(case.path, json=case.body)
            if not self._must_wait(reply):
                return self._judge(case, whole(reply.json())) if self._is(reply, 200) else refusal(reply)
            await self._pause(reply, draw)
        return "was always told to come later"

    async def _stream(self, draw: random.Random, case: Case) -> str | None:
        for _ in range(TRIES):
            async with self._http.stream("POST", case.path, json=streamed(case.body)) as reply:
                if not self._must_wait(reply):
                    if not self._is(reply, 200):
                        await reply.aread()
                        return refusal(reply)
                    answer = Answer()
                    async for event in events(reply):
                        take(answer, event)
                    return self._judge(case, answer)
                await reply.aread()
            await self._pause(reply, draw)
        return "was always told to come later"

    async def _leaves_a_stream(self, draw: random.Random, case: Case) -> str | None:
        left = draw.randrange(8)
        async with self._http.stream("POST", case.path, json=streamed(case.body)) as reply:
            if not self._is(reply, 200, 429):
                await reply.aread()
                return refusal(reply)
            if reply.status_code == 200:
                async for _ in events(reply):
                    left -= 1
                    if left < 0:
                        break
        return None

    async def _dies(self, draw: random.Random, case: Case) -> str | None:
        """What the kernel does to the connections of a process that is killed, at any time from now on."""
        body = streamed(case.body) if draw.random() < 0.5 else case.body
        async with connection(self.url) as (sock, loop):
            await loop.sock_sendall(sock, raw(case.path, json.dumps(body).encode()))
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(loop.sock_recv(sock, 100), draw.choice((0.001, 0.05, 0.3, 1.0)))
        return None

    async def _dies_sending(self, draw: random.Random, case: Case) -> str | None:
        request = raw(case.path, json.dumps(case.body).encode())
        async with connection(self.url) as (sock, loop):
            await loop.sock_sendall(sock, request[: draw.randrange(1, len(request))])
            await asyncio.sleep(draw.random() / 10)
        return None

    async def _sends_nonsense(self, draw: random.Random, case: Case) -> str | None:
        headers = {"Content-Type": "application/json"}
        reply = await self._http.post(case.path, content=draw.choice(NONSENSE), headers=headers)
        return None if self._is(reply, 400, 404, 429) and "error" in reply.json() else refusal(reply)

    async def _wrong_key(self, draw: random.Random, case: Case) -> str | None:
        headers = {"Authorization": draw.choice(("Bearer wrong", "Bearer", f"Basic {KEY}", ""))}
        reply = await self._http.post(case.path, json=case.body, headers=headers)
        return None if self._is(reply, 401) and "error" in reply.json() else refusal(reply)

    async def _looks_around(self, draw: random.Random, case: Case) -> str | None:
        pages = {"/health": 200, "/metrics": 200, "/server_info": 200, "/v1/models": 200, "/nothing": 404, CHAT: 405}
        path, status = draw.choice([*pages.items()])
        reply = await self._http.get(path)
        return None if self._is(reply, status) else refusal(reply)

    # What they share

    def _must_wait(self, reply: httpx.Response) -> bool:
        self.report.statuses["429"] += reply.status_code == 429
        return reply.status_code == 429

    async def _pause(self, reply: httpx.Response, draw: random.Random) -> None:
        await asyncio.sleep(float(reply.headers["retry-after"]) * draw.uniform(0.5, 1.5))

    def _is(self, reply: httpx.Response, *statuses: int) -> bool:
        self.report.statuses[str(reply.status_code)] += 1
        return reply.status_code in statuses

    def _judge(self, case: Case, answer: Answer) -> str | None:
        self.report.compared += len(case.texts)
        return complaint(case, answer)

    # What is left at the end

    async def _check_idle(self) -> None:
        """Nobody is there any more, so nothing may be running, waiting or held."""
        names = ("eyas:num_requests_running", "eyas:num_requests_waiting", "eyas:kv_cache_usage_perc")
        end = time.monotonic() + 30.0
        while True:
            page = (await self._http.get("/metrics")).text
            busy = {name: value for name in names if (value := gauge(page, name))}
            if not busy:
                break
            if time.monotonic() > end:
                self.report.problems.append(f"never idle again: {busy}")
                return
            await asyncio.sleep(0.1)
        reply = await self._http.post("/flush_cache")
        if not self._is(reply, 200):
            self.report.problems.append(f"the prefix cache cannot be emptied: {refusal(reply)}")

    async def _check_alone(self) -> None:
        """Whether the server is still sound."""
        for case in self.cases[:4]:
            if problem := await self._whole(random.Random(0), case):
                self.report.problems.append(f"afterwards: {problem}")

    async def _check_files(self) -> None:
        end = time.monotonic() + 15.0
        before = self.report.files[0]
        while (now := self._open_files()) > before and time.monotonic() < end:
            await asyncio.sleep(0.1)
        self.report.files.append(now)
        if now > before:
            self.report.problems.append(f"{now} files are open in the server, {before} were before")

    def _open_files(self) -> int:
        return len([*Path(f"/proc/{self.pid}/fd").iterdir()])

    async def _sample(self, begin: float) -> None:
        while True:
            self.report.memory.append((time.monotonic() - begin, resident(self.pid)))
            await asyncio.sleep(0.25)


def resident(pid: int) -> float:
    """MiB of memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth(samples: Sequence[tuple[float, float]]) -> float:
    """MiB by which a line through the second half of the samples rises; 0 where there are too few."""
    half = np.asarray(samples[len(samples) // 2 :])
    if len(half) < 4:
        return 0.0
    seconds, memory = half[:, 0], half[:, 1]
    return float(np.polyfit(seconds, memory, 1)[0] * (seconds[-1] - seconds[0]))


def gauge(page: str, name: str) -> float:
    (line,) = [line for line in page.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


# The protocol


def streamed(body: Mapping[str, Any]) -> dict[str, Any]:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


def refusal(reply: httpx.Response) -> str:
    return f"HTTP {reply.status_code}: {reply.text[:300]}"


def whole(body: Mapping[str, Any]) -> Answer:
    answer = Answer(tokens=body["usage"]["completion_tokens"], ended=True)
    for choice in body["choices"]:
        answer.texts[choice["index"]] = choice["text"] if "text" in choice else choice["message"]["content"]
        answer.finishes[choice["index"]] = choice["finish_reason"]
    return answer


def take(answer: Answer, event: str) -> None:
    """Adds an event of a stream. Raises ValueError for one that is an error."""
    if event == "[DONE]":
        answer.ended = True
        return
    chunk = json.loads(event)
    if "error" in chunk:
        raise ValueError(f"an error in the stream: {event[:300]}")
    for choice in chunk["choices"]:
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        answer.texts[choice["index"]] = answer.texts.get(choice["index"], "") + text
        if choice["finish_reason"]:
            answer.finishes[choice["index"]] = choice["finish_reason"]
    if chunk.get("usage"):
        answer.tokens = chunk["usage"]["completion_tokens"]


async def events(reply: httpx.Response) -> AsyncIterator[str]:
    async for line in reply.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def raw(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@contextlib.asynccontextmanager
async def connection(url: str) -> AsyncIterator[tuple[socket.socket, asyncio.AbstractEventLoop]]:
    """Which ends with a reset, not with a farewell."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", int(url.rpartition(":")[2])))
        try:
            yield sock, loop
        finally:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


# The truth


def truth(target: str, prompts: Sequence[str], tokens: int, seed: int, count: int) -> list[Case]:
    """``count`` requests, answered here: one at a time, in float32, without a drafter or a server."""
    from eyas.engine.llm import load

    draw = random.Random(seed)
    llm = load(target, dtype="float32", context_length=256, speculation="off")
    return [case(llm, draw, draw.choice(prompts), draw.randrange(1, tokens + 1)) for _ in range(count)]


def case(llm: Any, draw: random.Random, prompt: str, most: int) -> Case:
    settings, n, seed = draw.choice(SETTINGS), draw.choice((1, 1, 1, 2, 3)), draw.randrange(1 << 40)
    chat = draw.random() < 0.5
    content = [{"role": "user", "content": prompt}] if chat else prompt
    # off: what a target recommends for what a request leaves open would come between
    given = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, **settings, "max_tokens": most}
    found = [llm.generate(content, **given, seed=seed + k) for k in range(n)]
    body = {"messages" if chat else "prompt": content, **given, "n": n, "seed": seed}
    if draw.random() < 0.2:
        body["speculation"] = "off"
    return Case(
        path=CHAT if chat else COMPLETIONS,
        body=body,
        texts=tuple(answer.text for answer in found),
        finishes=tuple(answer.finish_reason for answer in found),
        tokens=sum(len(answer.tokens) for answer in found),
    )


@contextlib.contextmanager
def target_and_prompts(model: str) -> Iterator[tuple[str, list[str]]]:
    if model != "tiny":
        from peers.prompts import PROMPTS

        yield model, list(PROMPTS)
        return
    sys.path.append(str(HERE.parent / "tests"))
    from cli import tiny

    draw = random.Random(0)
    words = [" ".join(f"w{draw.randrange(3, 150)}" for _ in range(draw.randrange(1, 60))) for _ in range(30)]
    words += [f"{words[-1]} w{n}" for n in range(10)]  # and some that begin alike
    with tempfile.TemporaryDirectory(prefix="eyas-soak-") as folder:
        yield str(tiny.save(Path(folder))), words


def flags(drafter: str | None) -> list[str]:
    """Of a server that is too small for all who come."""
    given = ["--dtype", "float32", "--context-length", "256", "--api-key", KEY, "--served-model-name", "soak"]
    given += ["--max-running-requests", "8", "--max-queued-requests", "88", "--drain-timeout", "10"]
    given += ["--speculative-num-steps", "3", "--speculative-eagle-topk", "2"]
    return given + (["--drafter", drafter] if drafter else [])


def soak(
    model: str,
    drafter: str | None,
    requests: int,
    concurrency: int,
    *,
    seed: int = 0,
    cases: int = 80,
    tokens: int = 40,
    limit: float,
) -> Report:
    """Starts the server, sends all callers, ends it; the report says what was wrong."""
    with target_and_prompts(model) as (target, prompts):
        server = ServerProcess("eyas serve", [sys.executable, "-m", "eyas", "serve", target, *flags(drafter)])
        try:
            known = truth(target, prompts, tokens, seed, cases)
            server.wait()
            report = asyncio.run(Soak(server.url, server.process.pid, known, requests, concurrency, seed).run(limit))
        finally:
            status = server.end()
        report.problems += log_problems(server.log.read_text(errors="replace"), status)
        if not report.problems:
            server.log.unlink()
        else:
            report.problems.append(f"the server's log is {server.log}")
        return report


def log_problems(log: str, status: int) -> list[str]:
    """What the server's own log and end say."""
    bad = [
        line for line in log.splitlines() if re.search(r" (ERROR|CRITICAL) |Traceback|^\w*(Error|Exception)\b", line)
    ]
    found = [f"the log says: {line[:200]}" for line in bad[:3]]
    if status != 0:
        found.append(f"told to end, it ended with status {status}")
    if (drained := re.search(r"draining open_requests=(\d+)", log)) is None or drained[1] != "0":
        found.append(
            "at the end requests were open that nobody had made" if drained else "it never said that it drains"
        )
    return found


def show(report: Report) -> None:
    print(f"{report.requests} requests in {report.seconds:.0f} s, {report.compared} complete answers, each as alone")
    print("callers:  " + ", ".join(f"{kind} {count}" for kind, count in report.callers.most_common()))
    print("statuses: " + ", ".join(f"{status}: {count}" for status, count in sorted(report.statuses.items())))
    if report.memory and report.files:
        first, last = report.memory[0][1], report.memory[-1][1]
        most = max(mib for _, mib in report.memory)
        print(f"memory:   {first:.0f} MiB at first, {most:.0f} at most, {last:.0f} at last; in the second half")
        print(f"          {report.growth:+.1f} MiB by a line through its samples (bound {GROWTH_MIB:g})")
        print(f"files:    {report.files[0]} open before, {report.files[-1]} at the end")
    for problem in report.problems[:20]:
        print(f"WRONG: {problem}")
    print(f"{len(report.problems)} problems" if report.problems else "nothing lost, mixed up or leaked")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--model", default="tiny", help="tiny, smollm2, or a target's folder")
    parser.add_argument("--drafter", help="default: untrained for tiny, the one that comes with Eyas for smollm2")
    parser.add_argument("--cases", type=int, default=80, help="different requests, each answered alone first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds until it is given up")
    parser.add_argument("--out", type=Path, help="where all that was counted is written, as JSON")
    args = parser.parse_args()
    drafter = args.drafter or ("untrained" if args.model == "tiny" else None)
    report = soak(
        args.model,
        drafter,
        args.requests,
        args.concurrency,
        seed=args.seed,
        cases=args.cases,
        limit=args.limit,
    )
    if args.out:
        write(args.out, json.dumps(vars(report)) + "\n")
    show(report)
    sys.exit(1 if report.problems else 0)


if __name__ == "__main__":
    main()
