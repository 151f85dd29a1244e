"""Pairs of passes as a benchmark would have measured them, and the results they come to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eyas.bench.agreement import agreement
from eyas.bench.benchmark import Benchmark
from eyas.bench.facts import Facts
from eyas.bench.kernels import LABELS
from eyas.bench.pairing import Plan
from eyas.bench.passes import Answer, Level, Name, Pair, Pass
from eyas.bench.trace import Split
from eyas.bench.workload import Prompt, Workload
from eyas.bridges.metrics import Speculation
from eyas.core import DraftShape, SamplingParams

TEXT = "The falcon dives <b>& strikes</b> at 300 km/h. "


def answer(
    key: str, seconds: float, tokens: int = 33, *, first: float = 0.1, drafted: bool = False, **more: Any
) -> Answer:
    """``seconds`` for each token after the first."""
    total = first + seconds * (tokens - 1)
    given = {
        "text": TEXT,
        "pieces": (("The falcon", False), (TEXT[10:], drafted)),
        "prompt_tokens": 9,
        "finish": "length",
    }
    return Answer(key, first=first, total=total, gaps=(seconds,) * (tokens - 1), tokens=tokens, **given | more)


def one_pass(side: Name, level: Level, task: str, turn: int, seconds: float, count: int = 4, **more: Any) -> Pass:
    answers = tuple(answer(f"{task}/{n}", seconds, drafted=side == "with") for n in range(count))
    speculation = Speculation("made", 100, 300, 150, 250, (80, 50, 20), (100, 80, 50)) if side == "with" else None
    busy = count * answers[0].total / (level.value if level.kind == "concurrency" else 1)
    return Pass(turn, level, task, side, busy, answers, min(count, int(level.value)), speculation, **more)


def pairs(
    levels: Sequence[Level], gains: Sequence[float], tasks: Sequence[str] = ("chat",), rounds: int = 8, **more: Any
) -> list[Pair]:
    """``gains``: how much less time a token takes with speculation, at each level; with 2% noise."""
    random, made = np.random.default_rng(0), []
    for turn in range(rounds):
        for level, gain in zip(levels, gains, strict=True):
            for task in tasks:
                plain, fast = 0.02 * np.exp(random.normal(0, 0.02, 2)) / (1, gain)
                sides = (
                    one_pass("without", level, task, turn, plain, **more),
                    one_pass("with", level, task, turn, fast, **more),
                )
                made.append(Pair(*sides, order=("without", "with") if turn % 2 == 0 else ("with", "without")))
    return made


def facts() -> dict[Name, Facts]:
    shape = DraftShape(3, 1, 4)
    return {
        "without": Facts("http://127.0.0.1:1", engine="vLLM", version="1", model="/models/m", speculates=False),
        "with": Facts(
            "http://127.0.0.1:2", engine="vLLM", version="1", model="/models/m", speculates=True, shape=shape
        ),
    }


def profile(levels: Sequence[Level], steps: int | None = 10, **sides: Any) -> list[dict[str, Any]]:
    """The founding case: plain decoding of 10.8 ms, of which 51.5% is all-reduce; half as long again with a drafter."""
    shares = dict.fromkeys(LABELS, 0.0) | {"allreduce": 0.515, "matmul": 0.3, "attention": 0.085, "idle": 0.1}
    found = []
    for level in levels:
        entry: dict[str, Any] = {"level": vars(level)}
        for name, whole in (("without", 0.0108), ("with", 0.0162)):
            split = Split("GPU", {part: whole * 10 * share for part, share in shares.items()}, steps, [])
            entry[name] = {**split.as_record(), "running": int(level.value), "ranks": 8, "trace": "t.json.gz"}
        found.append(entry | sides)
    return found


def results(found: Sequence[Pair], training_seconds: float | None = None, even: float = 1.0) -> dict[str, Any]:
    return benchmark(found, training_seconds, even)._results(facts(), found, agreement(found), 0)


def benchmark(found: Sequence[Pair], training_seconds: float | None = None, even: float = 1.0) -> Benchmark:
    levels = tuple(dict.fromkeys(pair.level for pair in found))
    tasks = list(dict.fromkeys(pair.task for pair in found))
    workload = Workload(
        {task: (Prompt(f"{task}/0", task, []),) for task in tasks}, "the built-in prompts", ("1 empty (line 3)",)
    )
    plan = Plan(levels, SamplingParams(seed=0), rounds=len({pair.turn for pair in found}))
    about = {"command": ["eyas", "bench"], "eyas": "0", "commit": "abc", "when": "today", "client": {"cpu": "a CPU"}}
    return Benchmark({}, workload, plan, Path("x.json"), even=even, about=about, training_seconds=training_seconds)
