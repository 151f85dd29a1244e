"""Puts a load on a side: so many requests kept running, or so many a second that arrive at random."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from eyas.bench.passes import Answer, Level
from eyas.bench.workload import Prompt

Ask = Callable[[Prompt, int], Awaitable[Answer]]  # a prompt, and its number in the pass


@dataclass(frozen=True)
class Loaded:
    """``seconds`` from the first request sent to the last one answered. ``running``: requests at a time, on average."""

    answers: tuple[Answer, ...]
    seconds: float
    running: float


async def put(ask: Ask, prompts: Sequence[Prompt], level: Level, seed: int) -> Loaded:
    """Asks all prompts at this level. ``seed`` decides when they arrive, so that both sides get the same arrivals."""
    clients = _Clients(ask, prompts)
    if level.kind == "concurrency":
        await clients.keep(int(level.value))
    else:
        await clients.arrive(level.value, random.Random(seed))
    seconds = time.perf_counter() - clients.begin
    answers = tuple(answer for answer in clients.answers if answer is not None)
    return Loaded(answers, seconds, sum(answer.total for answer in answers) / seconds)


class _Clients:
    def __init__(self, ask: Ask, prompts: Sequence[Prompt]):
        self.ask, self.prompts = ask, prompts
        self.answers: list[Answer | None] = [None] * len(prompts)
        self.begin = time.perf_counter()

    async def keep(self, concurrency: int) -> None:
        """A closed loop: whoever has an answer asks the next question at once."""
        numbers = iter(range(len(self.prompts)))

        async def client() -> None:
            for number in numbers:
                await self._one(number)

        await _all([client() for _ in range(min(concurrency, len(self.prompts)))])

    async def arrive(self, rate: float, chance: random.Random) -> None:
        """An open loop: requests come when they come, however busy the server is."""
        arrivals, at = [], 0.0
        for number in range(len(self.prompts)):
            arrivals.append(self._later(number, at))
            at += chance.expovariate(rate)
        await _all(arrivals)

    async def _later(self, number: int, at: float) -> None:
        await asyncio.sleep(self.begin + at - time.perf_counter())
        await self._one(number)

    async def _one(self, number: int) -> None:
        start = time.perf_counter() - self.begin
        self.answers[number] = replace(await self.ask(self.prompts[number], number), start=start)


async def _all(coroutines: Sequence[Awaitable[None]]) -> None:
    """Waits for all; where one raises, the others are cancelled first, so that nothing runs on unseen."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
