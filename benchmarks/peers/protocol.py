"""What every worker and the driver say to each other: one JSON object a line. Needs nothing but Python.

The worker loads its model, writes ``{"ready": {...}}`` with its versions and settings, then waits. Each line it is
sent is a round, ``{"prompts": [[token ids]], "tokens": n, "warm_up": bool}``: all prompts at once, n new tokens each,
greedy, no end of sequence. It answers with a ``Result``, or with ``{"error": "..."}`` and goes on. End of input ends
it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

Prompts = list[list[int]]


@dataclass
class Result:
    """One round. Times are in seconds from the moment the prompts were handed over; one entry per prompt, in order."""

    seconds: float  # until the last token of all
    first: list[float]  # until each prompt's first token
    last: list[float]  # until each prompt's last token
    answers: Prompts  # the new token ids
    acceptance_length: float | None = None  # tokens a verify step, bonus included; None: not known, or no speculation


Round = Callable[[Prompts, int, bool], Result]


class Clock:
    """When each prompt's tokens came, and which."""

    def __init__(self, count: int):
        self.answers: Prompts = [[] for _ in range(count)]
        self.first, self.last = [0.0] * count, [0.0] * count
        self.begin = time.perf_counter()

    def hear(self, prompt: int, tokens: list[int]) -> None:
        """Notes tokens of a prompt that have just come."""
        if tokens:
            now = time.perf_counter() - self.begin
            if not self.answers[prompt]:
                self.first[prompt] = now
            self.last[prompt] = now
            self.answers[prompt] += tokens

    def result(self, acceptance_length: float | None = None) -> Result:
        seconds = time.perf_counter() - self.begin
        return Result(seconds, self.first, self.last, self.answers, acceptance_length)


def serve(load: Callable[[], tuple[Round, dict[str, Any]]]) -> None:
    """Runs a worker: ``load`` gives its round, and what is to be told of it."""

    def loaded() -> tuple[Callable[[Any], dict[str, Any]], dict[str, Any]]:
        run, about = load()
        return lambda order: asdict(run(order["prompts"], order["tokens"], order["warm_up"])), about

    listen(loaded)


def listen(load: Callable[[], tuple[Callable[[Any], dict[str, Any]], dict[str, Any]]]) -> None:
    """The same for orders of any kind: ``load`` gives what answers one.

    Whatever a library prints on the way goes to stderr, so that stdout carries the protocol alone.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    run, about = load()
    say({"ready": about})
    for line in sys.stdin:
        try:
            say(run(json.loads(line)))
        except Exception as error:
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"})


def versions(*packages: str) -> dict[str, str]:
    return {package: version(package) for package in packages}
