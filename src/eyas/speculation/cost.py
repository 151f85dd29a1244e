"""What a step brings and what it costs: the one predictor behind the policy, eval, tune and plan. No torch."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from statistics import median
from typing import Protocol

import numpy as np

from eyas.core import DraftShape

FORWARD, PROPOSE, REST = "forward", "propose", "rest"

SECOND_CHANCE = (
    0.5  # where the first child is wrong, the next one is right half as often as the first (measured 0.4-0.8)
)
CONFIRMED = 3  # samples until a place is believed: one of them may have compiled something
WINDOW, OLD = 15, 200  # samples that count, and the target passes after which they only do until there are newer ones
SURPRISE = 0.4  # log: how far a place that is not confirmed may be from what its neighbours say
PENALTY = 1e-4  # a further term of the fit must explain 1% of the costs

Place = tuple[int, int, int]  # B, T, and S rounded up to a power of two


@dataclass(frozen=True)
class AcceptanceRates:
    """How often drafts are right, one row for each depth; the last row holds for all that are deeper.

    ``by_rank[d][r]`` is the chance that the target's token is the drafter's r-th choice at position d, given that the
    draft was right up to there; ranks that are missing have none. ``tree`` is what trees were measured to bring beyond
    their root over what this says of them: a real tree follows each context's own probabilities, not the average.
    """

    by_rank: tuple[tuple[float, ...], ...]
    tree: float = 1.0

    def __post_init__(self) -> None:
        for row in self.by_rank:
            if not all(0 <= rate <= 1 for rate in row) or sum(row) > 1 + 1e-9:
                raise ValueError(f"Chances of ranks must be in [0, 1], and so must be their sum, got {row}.")
        if not 0 <= self.tree < math.inf:
            raise ValueError(f"tree must be a finite number >= 0, got {self.tree}.")

    @classmethod
    def from_first(cls, first: Sequence[float], width: int = 1, tree: float = 1.0) -> AcceptanceRates:
        """From the rates of the first choice by depth; each further rank gets its share of what the others missed."""
        rows = []
        for rate in first:
            row, missed = [rate], 1.0 - rate
            for _ in range(width - 1):
                row.append(missed * SECOND_CHANCE * rate)
                missed -= row[-1]
            rows.append(tuple(row))
        return cls(tuple(rows), tree)

    @classmethod
    def from_length(cls, length: float, shape: DraftShape) -> AcceptanceRates:
        """The one rate, the same at all depths, with which ``shape`` comes to this acceptance length.

        Raises ValueError where no rate does.
        """
        if not 1 <= length <= shape.num_steps + 1:
            raise ValueError(f"{shape.num_steps} steps emit between 1 and {shape.num_steps + 1} tokens, not {length}.")
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            tokens = expected_tokens(shape, cls.from_first([middle], shape.eagle_topk))
            low, high = (middle, high) if tokens < length else (low, middle)
        return cls.from_first([high], shape.eagle_topk)

    def at(self, depth: int) -> tuple[float, ...]:
        return self.by_rank[min(depth, len(self.by_rank) - 1)] if self.by_rank else ()


@lru_cache(maxsize=4096)
def expected_tokens(shape: DraftShape, rates: AcceptanceRates) -> float:
    """Tokens per verify step, bonus token included, >= 1.

    A node is accepted with the product of the chances along its path, and the tokens of a step are the nodes accepted,
    the root's bonus token among them: their sum is what is expected. Which nodes there are follows the drafter
    (``TreeBuilder``): the ``eagle_topk`` best of a level are expanded, the ``num_draft_tokens`` - 1 best of all kept.
    """
    frontier, nodes = [1.0], []
    for depth in range(shape.num_steps):
        row = rates.at(depth)[: shape.eagle_topk]
        level = sorted((chance * rate for chance in frontier for rate in row), reverse=True)
        nodes += level
        frontier = level[: shape.eagle_topk]
    hits = sum(heapq.nlargest(shape.num_draft_tokens - 1, nodes))
    return 1.0 + (hits if shape.eagle_topk == 1 else min(hits * rates.tree, shape.num_steps))


class Costs(Protocol):
    """What steps cost, measured (``CostModel``) or forecast. The arguments are those of ``CostModel``."""

    def seconds(self, kind: str, B: int, T: int, S: int) -> float | None:
        """Of one kind of work; None where it is unknown."""

    def step(self, shape: DraftShape | None, B: int, S: int) -> float | None:
        """Of a whole decoding step of B sequences, plain without a shape; None where it is unknown."""


class CostModel:
    """Measured seconds, and predictions from them, which follow a machine that becomes slower or faster.

    Three kinds make a step: ``forward`` of the target over B sequences of T tokens that look at S rows; ``propose``,
    the drafter's whole share of a step, with B rows in each of T passes (sequences times ``eagle_topk``, and
    ``num_steps``); ``rest``, all else, by B and T, with S = 0. Other kinds can be kept as well.

    Each place (B, T, S) holds its recent samples over the machine's speed, and counts as their median. The speed is
    read off the forwards, which are in every step, so that what is rarely measured follows it too.
    """

    def __init__(self) -> None:
        self._points: dict[str, dict[Place, _Point]] = {}
        self._surfaces: dict[str, _Surface] = {}
        self._slowness = 0.0  # log, against the first samples
        self._now = 0  # forwards recorded

    def record(self, kind: str, B: int, T: int, S: int, seconds: float) -> None:
        """Takes a measurement; what no clock can have meant (zero, negative, not finite) is left out."""
        if not 0 < seconds < math.inf:
            return
        place = _place(B, T, S)
        point = self._points.setdefault(kind, {}).setdefault(place, _Point())
        value = math.log(seconds) - self._slowness
        if kind == FORWARD:
            self._now += 1
            if point.busy(self._now):
                self._slowness += 0.3 * min(max(value - point.value, -0.3), 0.3)
                value = point.value  # or both would move, and with them all that is predicted from other places
        point.add(value, self._now)
        surface = self._surfaces.get(kind)
        if surface is not None and (len(point.samples) <= CONFIRMED or surface.age >= 16):
            del self._surfaces[kind]
        elif surface is not None:
            surface.age += 1

    def seconds(self, kind: str, B: int, T: int, S: int) -> float | None:
        """What it takes: measured there, or concluded from other places; None where nothing of this kind is known."""
        points = self._points.get(kind)
        if not points:
            return None
        place = _place(B, T, S)
        point = points.get(place)
        if point is not None and point.confirmed:
            return math.exp(point.value + self._slowness)
        surface = self._surfaces.get(kind)
        if surface is None:
            surface = self._surfaces[kind] = _Surface(kind, points)
        value = surface.at(place)
        if point is not None:
            value = min(max(point.value, value - SURPRISE), value + SURPRISE) if surface.confirmed else point.value
        return math.exp(value + self._slowness)

    def samples(self, kind: str, B: int, T: int) -> int:
        """Measurements that predictions for B and T at any S rest on."""
        return sum(len(p.samples) for (b, t, _), p in self._points.get(kind, {}).items() if (b, t) == (B, T))

    def knows(self, kind: str) -> bool:
        return kind in self._points

    def step(self, shape: DraftShape | None, B: int, S: int) -> float | None:
        """Seconds of a whole decoding step of B sequences; None where the target or the drafter was never measured."""
        nodes = shape.num_draft_tokens if shape else 1
        parts = [self.seconds(FORWARD, B, nodes, S)]
        if shape:
            parts.append(self.seconds(PROPOSE, B * shape.eagle_topk, shape.num_steps, S))
        known = [part for part in parts if part is not None]
        return sum(known) + (self.seconds(REST, B, nodes, 0) or 0.0) if len(known) == len(parts) else None


@dataclass(frozen=True)
class Estimate:
    """What a choice promises for the whole batch."""

    shape: DraftShape | None  # None: plain decoding
    tokens: float  # expected of one sequence that is drafted for
    seconds: float | None  # of one step; None: unknown
    speed: float  # expected tokens per second of all sequences; 0 while the seconds are unknown


def best(
    candidates: Iterable[DraftShape],
    model: Costs,
    rates: AcceptanceRates,
    *,
    sequences: int,
    drafted: int | None = None,
    bucket: int | None = None,
    length: int,
) -> list[Estimate]:
    """Plain decoding and every candidate, the fastest first, what is unknown last.

    ``drafted`` of the ``sequences`` can be drafted for (None: all), ``bucket`` rows are computed for them (None: as
    many), ``length`` rows of the cache are looked at.
    """
    drafted, bucket = sequences if drafted is None else drafted, bucket or sequences
    shapes, estimates = tuple(candidates), []
    forwards = [model.seconds(FORWARD, bucket, shape.num_draft_tokens, length) for shape in shapes]
    for shape in (None, *shapes):
        tokens = expected_tokens(shape, rates) if shape else 1.0
        seconds = model.step(shape, bucket, length)
        if shape is None and seconds:  # a disturbed measurement must not make drafting look cheaper than not drafting
            seconds = min([seconds, *(forward for forward in forwards if forward)])
        speed = (sequences + drafted * (tokens - 1)) / seconds if seconds else 0.0
        estimates.append(Estimate(shape, tokens, seconds, speed))
    return sorted(estimates, key=lambda estimate: -estimate.speed)


STEPS, TOPK, DRAFT_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 4, 8), (4, 8, 16, 32)


def grid(
    steps: Sequence[int] = STEPS, topk: Sequence[int] = TOPK, draft_tokens: Sequence[int] = DRAFT_TOKENS
) -> list[DraftShape]:
    """Every shape of these numbers that exists: chains, and trees as large as said and no larger than they can be."""
    shapes = []
    for k in sorted(set(topk)):
        for count in sorted(set(steps)):
            sizes = [count + 1] if k == 1 else sorted(set(draft_tokens))
            shapes += [DraftShape(count, k, n) for n in sizes if count < n <= DraftShape.most_tokens(count, k)]
    return shapes


class _Point:
    """Samples of one place: (when, log seconds over the machine's slowness)."""

    def __init__(self) -> None:
        self.samples: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self.value = 0.0

    def add(self, value: float, now: int) -> None:
        self.samples.append((now, value))
        recent = sum(now - then <= OLD for then, _ in self.samples)
        while len(self.samples) > max(recent, CONFIRMED):
            self.samples.popleft()
        values = [value for _, value in self.samples]
        self.value = median(values) if self.confirmed else min(values)

    @property
    def confirmed(self) -> bool:
        return len(self.samples) >= CONFIRMED

    def busy(self, now: int) -> bool:
        """Measured all the time of late: a change here is the machine's, not news of a place long not visited."""
        return len(self.samples) >= 8 and now - self.samples[-8][0] <= 32


class _Surface:
    """Log seconds everywhere, from confirmed places (or all, while there are none).

    A fit that cannot fall with B, T or S (fixed, per token, per row looked at), times how far the measured places
    nearby are from it.
    """

    def __init__(self, kind: str, points: dict[Place, _Point]) -> None:
        self.kind, self.age = kind, 0
        known = {place: point for place, point in points.items() if point.confirmed}
        self.confirmed = bool(known)
        values = {place: point.value for place, point in (known or points).items()}
        self._logs = np.log2(np.array(list(values)))
        self._coefficients = _fit(np.array([self._terms(place) for place in values]), np.exp(list(values.values())))
        self._residuals = np.array([value - self._fitted(place) for place, value in values.items()])
        self._cache: dict[Place, float] = {}

    def at(self, place: Place) -> float:
        if place not in self._cache:
            distances = np.abs(self._logs - np.log2(place)) @ np.array([2.0, 2.0, 1.0])
            weights = np.exp2(-2 * distances)
            nearby = float(weights @ self._residuals / (weights.sum() + 0.02))
            self._cache[place] = self._fitted(place) + nearby
        return self._cache[place]

    def _fitted(self, place: Place) -> float:
        return math.log(float(np.dot(self._terms(place), self._coefficients)))

    def _terms(self, place: Place) -> list[float]:
        """What comes first explains a single measurement: of a forward its fixed share, of a draft its passes."""
        B, T, S = place
        return [T, 1.0, B * T, B * S * T] if self.kind == PROPOSE else [1.0, B * T, B * S]


def _place(B: int, T: int, S: int) -> Place:
    return B, T, 1 << max(S - 1, 0).bit_length()


def _fit(terms: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Non-negative least squares of the relative error: few terms, so every subset is tried, the small ones first."""
    count, width = terms.shape
    scale = terms.max(axis=0)
    rows = terms / scale / seconds[:, None]
    found, least = np.zeros(width), math.inf
    for size in range(1, min(count, width) + 1):
        for subset in map(list, combinations(range(width), size)):
            part = np.linalg.lstsq(rows[:, subset], np.ones(count), rcond=None)[0]
            loss = float(np.mean((rows[:, subset] @ part - 1) ** 2)) + PENALTY * size
            if (part >= 0).all() and loss < least - 1e-9:
                found, least = np.zeros(width), loss
                found[subset] = part
    return found / scale
