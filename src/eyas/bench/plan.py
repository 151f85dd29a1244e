"""Would speculative decoding pay on a machine one does not have? Step times from data sheets, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eyas.bench.hardware import Hardware
from eyas.bench.roofline import Forecast, Split
from eyas.bench.shapes import (
    Model,
    check_parallel,
    default_drafter,
    read_drafter,
    read_target,
    target_model,
    with_kv_bytes,
)
from eyas.core import DraftShape, UsageError
from eyas.speculation.cost import AcceptanceRates, best, expected_tokens

KV_BYTES = {"auto": 2.0, "fp8": 1.0}
USUAL = DraftShape(3, 1, 4)  # what SGLang takes for most targets


@dataclass(frozen=True)
class Question:
    """What is to be predicted. ``shapes`` are the drafts to choose among; ``rates`` None leaves speedups open."""

    target: Path | str
    hardware: Hardware
    shapes: tuple[DraftShape, ...]
    drafter: Path | str | None = None  # None: of the usual shape
    gpus: int = 1
    context: int = 1024  # tokens in the cache of each sequence
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    rates: AcceptanceRates | None = None
    quantization: str | None = None
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"

    def __post_init__(self) -> None:
        sizes = {"gpus": self.gpus, "context": self.context, **{f"concurrency {n}": n for n in self.concurrency}}
        for name, value in sizes.items():
            if value < 1:
                raise UsageError(f"{name.split()[0]} must be at least 1, got {value}.")


@dataclass(frozen=True)
class Point:
    """One concurrency: the steps of ``shape``, the fastest draft where acceptance is known.

    ``tokens``, ``speed`` and ``speedup`` are None where it is not; speeds are tokens per second of all sequences.
    ``pays`` is false where plain decoding is the best of all. ``break_even``: the acceptance length at which this
    shape is as fast as plain decoding.
    """

    concurrency: int
    shape: DraftShape
    plain: Split
    verify: Split
    draft: Split
    tokens: float | None

    @property
    def break_even(self) -> float:
        return (self.verify + self.draft).total / self.plain.total

    @property
    def plain_speed(self) -> float:
        return self.concurrency / self.plain.total

    @property
    def speedup(self) -> float | None:
        return None if self.tokens is None else self.tokens / self.break_even

    @property
    def speed(self) -> float | None:
        return None if self.speedup is None else self.plain_speed * self.speedup

    @property
    def pays(self) -> bool | None:
        return None if self.speedup is None else self.speedup > 1


@dataclass(frozen=True)
class Plan:
    question: Question
    target: Model
    drafter: Model
    points: tuple[Point, ...]

    @property
    def break_even_concurrency(self) -> int | None:
        """The first concurrency asked about from which on nothing is gained; None where all gain, or none is known."""
        for index, point in enumerate(self.points):
            if all(later.pays is False for later in self.points[index:]):
                return point.concurrency
        return None

    def notes(self) -> list[str]:
        """What a reader must know, one sentence each."""
        question, hardware = self.question, self.question.hardware
        notes = ["Data sheets and micro-benchmarks, no measurement of this pair: see docs/plan.md for how far off."]
        if self.target.experts:
            notes.append("Experts are taken to be chosen evenly and independently, which overstates how many are read.")
        if question.rates is not None and len(question.rates.by_rank) < max(s.num_steps for s in question.shapes):
            notes.append("Deeper positions than were given accept as the last one did.")
        if question.rates is not None and any(shape.eagle_topk > 1 for shape in question.shapes):
            notes.append("A tree's further candidates are taken to be right half as often as the first of those left.")
        room = hardware.memory_gb * 1e9 * question.gpus
        for point in self.points:
            cache = self.target.attention.bytes_per_token * question.context * point.concurrency
            copies = question.gpus / min(question.gpus, self.target.attention.kv_heads)
            if (needed := self.target.bytes + self.drafter.bytes + cache * copies) > room:
                notes.append(
                    f"At concurrency {point.concurrency} weights and cache take {needed / 1e9:,.0f} GB, and there are "
                    f"{room / 1e9:,.0f} GB."
                )
                break
        return notes


def plan(question: Question) -> Plan:
    """Raises UsageError, TargetError or CheckpointError for what cannot be predicted."""
    described = read_target(question.target)
    kv_bytes = KV_BYTES[question.kv_cache_dtype]
    target = target_model(described, question.quantization, kv_bytes)
    if question.drafter is None:
        drafter = default_drafter(described, target)
    else:
        drafter = read_drafter(question.drafter, target)
    drafter = with_kv_bytes(drafter, kv_bytes)
    check_parallel(target, question.gpus)
    forecast = Forecast(target, drafter, question.hardware, question.gpus)
    points = tuple(_point(forecast, question, B) for B in sorted(set(question.concurrency)))
    return Plan(question, target, drafter, points)


def _point(forecast: Forecast, question: Question, B: int) -> Point:
    rates, S = question.rates, question.context
    if rates is None:
        shape = USUAL if USUAL in question.shapes else question.shapes[0]
    else:
        ranked = best(question.shapes, forecast, rates, sequences=B, length=S)
        shape = next(estimate.shape for estimate in ranked if estimate.shape is not None)
    return Point(
        concurrency=B,
        shape=shape,
        plain=forecast.verify(B, 1, S),
        verify=forecast.verify(B, shape.num_draft_tokens, S),
        draft=forecast.draft(shape, B, S),
        tokens=None if rates is None else expected_tokens(shape, rates),
    )


def needed_length(forecast: Forecast, shape: DraftShape, speedup: float, concurrency: int, context: int) -> float:
    """The acceptance length that would explain a measured speedup; above ``num_steps`` + 1 none does."""
    spent, plain = (forecast.step(each, concurrency, context) for each in (shape, None))
    assert spent is not None and plain is not None
    return speedup * spent / plain


def rates_by_position(rates: Sequence[float], width: int) -> AcceptanceRates:
    """From acceptance rates by position, as engines report them. Raises UsageError for what is none."""
    wrong = next((rate for rate in rates if not 0 <= rate <= 1), None)
    if not rates or wrong is not None:
        raise UsageError(f"--acceptance takes rates between 0 and 1 with commas between them, got {wrong}.")
    return AcceptanceRates.from_first(list(rates), width)


def rates_of_length(length: float, shapes: Sequence[DraftShape]) -> AcceptanceRates:
    """From an acceptance length, which belongs to one shape: the same rate at every position is assumed."""
    if len(shapes) != 1:
        raise UsageError(
            "an acceptance length belongs to one draft shape: give --steps (and --topk, --draft-tokens) one number "
            "each, or the rates by position (--acceptance)."
        )
    try:
        return AcceptanceRates.from_length(length, shapes[0])
    except ValueError as error:
        raise UsageError(f"--acceptance-length: {error}") from None
