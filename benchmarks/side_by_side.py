"""What side-by-side scripts share: interleaved rounds and their book, medians with intervals, and where they ran."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from eyas.bench.benchmark import write

T = TypeVar("T")


def turned(names: Sequence[T], turn: int) -> list[T]:
    """All of them, each turn beginning with another one, so that drift hits all alike."""
    first = turn % max(len(names), 1)
    return [*names[first:], *names[:first]]


def only(known: Mapping[str, T], names: Sequence[str] | None) -> dict[str, T]:
    """Those that ``--only`` names, all without it. Ends the script where there is no such one."""
    if unknown := set(names or ()) - set(known):
        raise SystemExit(f"--only: there is no {', '.join(sorted(unknown))}, but {', '.join(known)}")
    return {name: value for name, value in known.items() if not names or name in names}


@dataclass
class Book:
    """What was measured, as JSON: by contender and concurrency, one entry a round, in the order of the rounds."""

    about: dict[str, Any]
    rounds: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    path: Path | None = None

    @classmethod
    def read(cls, path: Path) -> Book:
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def enter(self, name: str, concurrency: int, entry: dict[str, Any]) -> None:
        self.rounds.setdefault(name, {}).setdefault(str(concurrency), []).append(entry)

    def of(self, name: str, concurrency: int) -> list[dict[str, Any]]:
        return self.rounds.get(name, {}).get(str(concurrency), [])

    def write(self) -> None:
        """The whole file anew, complete or not at all."""
        if self.path is not None:
            write(self.path, json.dumps({"about": self.about, "rounds": self.rounds}) + "\n")


def interleave(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Calls every contender once a round, in turn."""
    results: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name in turned(list(contenders), turn):
            results[name].append(contenders[name]())
        print(f"  round {turn + 1} of {rounds}", end="\r", flush=True)
    print(" " * 40, end="\r")
    return results


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float, float]:
    """Median of the rounds' ratios with a 95% interval, by resampling whole rounds."""
    ratios = np.asarray(numerators) / np.asarray(denominators)
    random = np.random.default_rng(0)
    medians = np.median(random.choice(ratios, (10_000, len(ratios))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(np.median(ratios)), float(low), float(high)


def show_ratio(what: str, numerators: Sequence[float], denominators: Sequence[float], bar: str = "") -> None:
    middle, low, high = ratio(numerators, denominators)
    print(f"{what:<58} {middle:6.2f}x  [{low:.2f}, {high:.2f}]  {bar}")


def show_medians(results: Mapping[str, Sequence[float]], unit: str) -> None:
    for name, values in results.items():
        print(f"{name:<58} {statistics.median(values):8.2f} {unit}  ({min(values):.2f} to {max(values):.2f})")


def provenance(packages: Sequence[str] = ("torch", "transformers")) -> str:
    """Machine, threads and versions, in a line."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    models = [line for line in cpuinfo.read_text().splitlines() if "model name" in line] if cpuinfo.exists() else []
    cpu = models[0].split(":", 1)[1].strip() if models else platform.processor()
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return f"{cpu}, {torch.get_num_threads()} threads, Python {platform.python_version()}, {versions}"


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
