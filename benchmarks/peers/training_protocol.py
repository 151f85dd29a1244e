"""What a training worker and the driver say to each other: one JSON object a line. Needs nothing but Python.

The worker gets a ``Task`` as a file, loads, and writes ``{"ready": {...}}`` with its versions and settings. Each line
it is sent is a round, ``{"updates": [numbers of batches]}``: it makes one update of the drafter with each of them. It
answers with the seconds that took, the mean loss, and the most memory it has held so far, or with ``{"error": "..."}``.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Update = Callable[[int], float]  # from a batch's number to the loss


@dataclass(frozen=True)
class Task:
    target: str  # a model folder
    data: str  # a folder of ``eyas data``
    layer_ids: list[int]  # entry ids of the states the drafter is fed
    draft_ids: list[int]  # target ids of the draft vocabulary
    unroll: int
    batch_tokens: int
    threads: int
    batches: list[list[tuple[list[int], list[bool]]]]  # token ids and loss mask of the rows of each

    @classmethod
    def read(cls, file: str) -> Task:
        return cls(**json.loads(Path(file).read_text(encoding="utf-8")))


def serve(load: Callable[[], tuple[Update, dict[str, Any]]]) -> None:
    """Runs a worker. Whatever a library prints goes to stderr, so that stdout carries the protocol alone."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    update, about = load()
    say({"ready": about})
    for line in sys.stdin:
        try:
            begin = time.perf_counter()
            losses = [update(number) for number in json.loads(line)["updates"]]
            seconds = time.perf_counter() - begin
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            say({"seconds": seconds, "loss": sum(losses) / len(losses), "peak": peak})
        except Exception as error:
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"})
