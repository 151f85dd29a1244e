"""What side-by-side scripts share: interleaved rounds, medians with intervals, and where they ran."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np


def interleave(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Calls every contender once a round, each round beginning with another one, so that drift hits all alike."""
    names = list(contenders)
    results: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
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
