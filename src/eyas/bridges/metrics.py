"""How well drafts were accepted, in one definition for every engine.

Acceptance length: tokens emitted per verify step, bonus token included. Acceptance rate at a position: accepted there /
drafts that reached it. The engines count otherwise, each in several ways; ``sglang.metrics`` and ``vllm.metrics`` turn
what they say into this. What an engine does not say stays unknown (None): nothing is made up from a mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from eyas.core import EyasError

if TYPE_CHECKING:
    from eyas.engine.stats import AcceptanceStats


class MetricsError(EyasError):
    """Text or JSON that does not hold the metrics it was taken for."""


class CounterReset(MetricsError):
    """A counter went backwards: the engine was restarted, or its statistics were cleared, in the middle of a run."""


@dataclass(frozen=True)
class Speculation:
    """What is known of some drafts. ``mean_length`` is an acceptance length that came without its counts."""

    source: str
    steps: int | None = None  # verify steps, one for each sequence and pass
    drafted: int | None = None  # draft tokens verified; the root is none of them
    accepted: int | None = None  # of these; the bonus token is none of them
    emitted: int | None = None  # tokens that reached an answer, bonus tokens included
    accepted_at: tuple[int, ...] | None = None  # [position], of drafts accepted there
    reached_at: tuple[int, ...] | None = None  # [position], of drafts as long as that and alive before it
    reached_least: tuple[int, ...] | None = None  # [position], at least so many, where reached_at is unknown
    mean_length: float | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def acceptance_length(self) -> float | None:
        """Of what was emitted; where that is unknown, of what was accepted, which is more by what an answer's end cuts
        off its last step.
        """
        if self.steps and self.emitted is not None:
            return self.emitted / self.steps
        if self.steps and self.accepted is not None:
            return (self.steps + self.accepted) / self.steps
        return self.mean_length

    @property
    def acceptance_rates(self) -> tuple[float | None, ...] | None:
        """By position, None where no draft came; unknown altogether where it is unknown how many drafts did."""
        if self.accepted_at is None or self.reached_at is None:
            return None
        return tuple(a / r if r else None for a, r in zip(self.accepted_at, self.reached_at, strict=True))

    @property
    def acceptance_rate_bounds(self) -> tuple[tuple[float, float] | None, ...] | None:
        """Between what the rates by position must be: apart only where drafts were of different, untold lengths.

        At most the drafts accepted at the position before can have reached this one.
        """
        if self.accepted_at is None or self.steps is None:
            return None
        least = self._least or self.accepted_at
        most = self.reached_at or all_full(self.steps, self.accepted_at)
        bounds = zip(self.accepted_at, least, most, strict=True)
        return tuple((a / high, a / low if low else 0.0) if high else None for a, low, high in bounds)

    def plus(self, other: Speculation) -> Speculation:
        """Both together: known where both are."""
        return replace(
            self,
            steps=_sum(self.steps, other.steps),
            drafted=_sum(self.drafted, other.drafted),
            accepted=_sum(self.accepted, other.accepted),
            emitted=_sum(self.emitted, other.emitted),
            accepted_at=_sums(self.accepted_at, other.accepted_at),
            reached_at=_sums(self.reached_at, other.reached_at),
            reached_least=_sums(self._least, other._least),
            mean_length=None,
            notes=tuple(dict.fromkeys(self.notes + other.notes)),
        )

    def as_record(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "acceptance_length": self.acceptance_length,
            "acceptance_rates": self.acceptance_rates,
            "acceptance_rate_bounds": self.acceptance_rate_bounds,
            "notes": list(self.notes),
        }

    @property
    def _least(self) -> tuple[int, ...] | None:
        return self.reached_at or self.reached_least or self.accepted_at


def total(parts: Sequence[Speculation], source: str, notes: tuple[str, ...] = ()) -> Speculation:
    """All of one or more parts."""
    whole_of_it = reduce(Speculation.plus, parts)
    return replace(whole_of_it, source=source, notes=whole_of_it.notes + notes)


@dataclass(frozen=True)
class Meaning:
    """What a percentage would mean if a certain counter showed it: an acceptance length between two bounds."""

    counter: str
    formula: str
    least: float
    most: float

    @property
    def possible(self) -> bool:
        return self.most >= 1


def from_stats(stats: AcceptanceStats) -> Speculation:
    """From the embedded engine's own counts."""
    return Speculation(
        "Eyas",
        steps=stats.steps,
        drafted=stats.drafted,
        accepted=sum(stats.accepted),
        emitted=stats.emitted,
        accepted_at=tuple(stats.accepted),
        reached_at=tuple(stats.reached),
    )


def from_histogram(histogram: Sequence[int], positions: int) -> tuple[int, ...]:
    """Accepted by position, from how many steps accepted 0, 1, 2, ... draft tokens."""
    return tuple(sum(histogram[i + 1 :]) for i in range(positions))


def all_full(steps: int, accepted_at: tuple[int, ...]) -> tuple[int, ...]:
    """Reached by position where every draft was as long as the others: what was accepted at the position before."""
    return (steps, *accepted_at)[: len(accepted_at)]


def by_position(speculation: Speculation, accepted_at: tuple[int, ...]) -> Speculation:
    """Adds what is known by position of chains that could be as long as there are positions, if perhaps not all were.

    No more drafts can have been too short for a position than draft tokens are missing.
    """
    steps, drafted = speculation.steps, speculation.drafted
    assert steps is not None and drafted is not None
    reached_at, missing = all_full(steps, accepted_at), steps * len(accepted_at) - drafted
    if missing == 0:
        return replace(speculation, accepted_at=accepted_at, reached_at=reached_at)
    least = tuple(max(most - missing, accepted) for most, accepted in zip(reached_at, accepted_at, strict=True))
    note = "some drafts were shorter than others, so the rates by position are known between bounds"
    return replace(speculation, accepted_at=accepted_at, reached_least=least, notes=(note,))


def count(source: Mapping[str, Any], *names: str) -> int | None:
    """The first of ``names`` that is there. Raises MetricsError where it is no count."""
    for name in names:
        if name in source and source[name] is not None:
            value = source[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise MetricsError(f"{name}: expected a count, found {value!r}")
            return value
    return None


def counts(source: Mapping[str, Any], *names: str) -> list[int] | None:
    for name in names:
        if name in source and source[name] is not None:
            values = source[name]
            if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
                raise MetricsError(f"{name}: expected a list of counts, found {values!r}")
            return values
    return None


Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Exposition:
    """What a /metrics page says: values by sample name and labels."""

    samples: Mapping[str, Mapping[Labels, float]]

    @staticmethod
    def parse(text: str) -> Exposition:
        """From the Prometheus text format. Raises MetricsError for anything else."""
        from prometheus_client.parser import text_string_to_metric_families

        samples: dict[str, dict[Labels, float]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = float(sample.value)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise MetricsError(f"not a Prometheus text: {error}") from error
        return Exposition(samples)

    def values(self, name: str, **labels: str) -> dict[Labels, float]:
        return {at: v for at, v in self.samples.get(name, {}).items() if labels.items() <= dict(at).items()}

    def increase(self, earlier: Exposition | None, name: str, **labels: str) -> dict[Labels, float]:
        """How much each counter grew. Without an earlier page: since the engine's start.

        Raises CounterReset where one shrank, vanished, or was created anew (its ``_created`` sample tells).
        """
        now = self.values(name, **labels)
        if earlier is None:
            return now
        then = earlier.values(name, **labels)
        created = name.removesuffix("_total") + "_created"
        anew = [
            at for at, when in earlier.values(created, **labels).items() if self.values(created).get(at, when) != when
        ]
        if anew or any(now.get(at, -1.0) < value for at, value in then.items()):
            raise CounterReset(
                f"{name} started again: the engine was restarted between the two readings; measure again"
            )
        return {at: value - then.get(at, 0.0) for at, value in now.items()}


def whole(values: Iterable[float], name: str) -> int:
    """The sum of counters, which must be a count."""
    total = sum(values)
    if not math.isfinite(total) or total < 0 or total != int(total):
        raise MetricsError(f"{name}: expected a count, found {total!r}")
    return int(total)


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _sums(one: tuple[int, ...] | None, other: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if one is None or other is None:
        return None
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))
