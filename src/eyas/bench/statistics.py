"""Speedups with their intervals, by resampling whole rounds: requests of one pass wait for each other, and so are not
independent; rounds are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

RESAMPLES = 20_000
CONFIDENCE = 0.95
ENOUGH = 6  # rounds: with fewer, no resampling reaches 95%


@dataclass(frozen=True)
class Interval:
    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def speedup(with_: Sequence[float], without: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Of speeds by round, paired: the geometric mean of the rounds' ratios, which drift does not touch.

    The percentile interval of few rounds is too narrow, since the spread of n rounds is that of n - 1: its quantiles
    are moved out as Student's are (Hesterberg 2015, "expanded percentile"). No mean of rounds lies beyond the least and
    the greatest of them, so Student's own interval is taken where it is wider. The resamples are the same each time.
    """
    from scipy.stats import norm, t

    logs = np.log(np.asarray(with_, float) / np.asarray(without, float))
    count = len(logs)
    middle = logs.mean()
    if count < 2:
        return Interval(math.exp(middle), 0.0, math.inf)
    reach = -t.ppf((1 - confidence) / 2, count - 1)
    tail = norm.cdf(-math.sqrt(count / (count - 1)) * reach)
    low, high = np.quantile(logs[_resamples(count)].mean(axis=1), (tail, 1 - tail))
    half = reach * logs.std(ddof=1) / math.sqrt(count)
    return Interval(math.exp(middle), math.exp(min(low, middle - half)), math.exp(max(high, middle + half)))


@lru_cache(maxsize=8)
def _resamples(count: int) -> np.ndarray:
    """Rounds drawn with replacement, int [RESAMPLES, count]."""
    return np.random.default_rng(0).integers(count, size=(RESAMPLES, count))


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles; None of nothing."""
    if not len(values):
        return None
    p50, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99))
    return {"mean": float(np.mean(values)), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def curve(values: Sequence[float], points: int = 41) -> list[float]:
    """The quantiles from least to most."""
    return [float(v) for v in np.quantile(values, np.linspace(0, 1, points))] if len(values) else []


def crossing(places: Sequence[float], speedups: Sequence[float], even: float = 1.0) -> float | None:
    """Where the speedup falls to ``even``, between two places, both in logarithms; None where it does not.

    The last one, if it does so several times.
    """
    for n in range(len(places) - 1, 0, -1):
        above, below = (math.log(s / even) for s in (speedups[n - 1], speedups[n]))
        if above > 0 >= below:
            share = above / (above - below)
            return math.exp(math.log(places[n - 1]) * (1 - share) + math.log(places[n]) * share)
    return None
