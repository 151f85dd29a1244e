"""Ways of drafting to choose among: which are worth running, which are left, what engines read. Runs nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise, product
from typing import Any, TypeVar

import numpy as np

from eyas.core import DraftShape, UsageError
from eyas.engine.policy import describe
from eyas.speculation.cost import AcceptanceRates, Estimate, best, expected_tokens

T = TypeVar("T")


@dataclass(frozen=True)
class Variant:
    """Flags and variables of an engine's own that are tried."""

    flags: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return " ".join([*(f"{name}={value}" for name, value in self.variables), *self.flags])


@dataclass(frozen=True)
class Contender:
    """One way of running the engine. ``shape`` None drafts nothing, unless ``auto``: the engine decides by itself."""

    shape: DraftShape | None = None
    variant: Variant = field(default_factory=Variant)
    auto: bool = False

    def __str__(self) -> str:
        drafts = "auto" if self.auto else describe(self.shape)
        return f"{drafts}, {self.variant}" if str(self.variant) else drafts

    @property
    def plain(self) -> bool:
        return self.shape is None and not self.auto


def variants(flags: Sequence[str], variables: Sequence[str]) -> list[Variant]:
    """Every combination of ``--flag=a,b`` and ``NAME=a,b``, that of the first values first.

    An empty value leaves the flag or variable out, ``on`` is a flag without a value, and a comma within a value is
    ``\\,``.
    """
    choices: list[list[tuple[str, str, str]]] = []
    for kind, given in (("flag", flags), ("variable", variables)):
        for text in given:
            name, equals, values = text.partition("=")
            if not equals or not name.strip("-") or name.startswith("--") != (kind == "flag"):
                form = "--vary takes '--flag=a,b'" if kind == "flag" else "--vary-env takes NAME=a,b"
                raise UsageError(f"{form}, got {text!r}.")
            split = [value.replace(r"\,", ",") for value in re.split(r"(?<!\\),", values)]
            choices.append([(kind, name, value) for value in split])
    found = []
    for combination in product(*choices):
        set_ = [one for one in combination if one[2]]
        parts = [[name] if value == "on" else [name, value] for kind, name, value in set_ if kind == "flag"]
        settings = tuple((name, value) for kind, name, value in set_ if kind == "variable")
        found.append(Variant(tuple(part for pair in parts for part in pair), settings))
    return found


# What is worth running


@dataclass(frozen=True)
class StepTable:
    """Seconds of whole steps by concurrency and shape, as measured; of other shapes by a fit that cannot fall with
    steps, tokens or the drafter's rows.
    """

    measured: Mapping[tuple[int, DraftShape | None], float]

    def seconds(self, kind: str, B: int, T: int, S: int) -> float | None:
        return None  # only whole steps are known

    def step(self, shape: DraftShape | None, B: int, S: int) -> float | None:
        from scipy.optimize import nnls

        here = {known: seconds for (size, known), seconds in self.measured.items() if size == B}
        if shape in here or None not in here or len(here) < 2:
            return here.get(shape)
        rows = np.array([_terms(known) for known in here])
        seconds = np.array(list(here.values()))
        found, _ = nnls(rows / seconds[:, None], np.ones(len(here)))
        return float(_terms(shape) @ found)


def _terms(shape: DraftShape | None) -> np.ndarray:
    """A plain step; what any draft adds; and what it adds by depth, by tokens to verify, and by rows to draft from."""
    if shape is None:
        return np.array([1.0, 0, 0, 0, 0])
    steps, tokens = shape.num_steps, shape.num_draft_tokens - 1
    return np.array([1.0, 1, steps, tokens, steps * (shape.eagle_topk - 1)])


def surveyed(shapes: Sequence[DraftShape]) -> list[DraftShape]:
    """A few that say what the others cost: of chains, and of trees of each width, the ends and the middle."""
    found = []
    for _, of_width in groupby(sorted(shapes, key=_size), key=lambda shape: shape.eagle_topk):
        ordered = list(of_width)
        found += [ordered[0], ordered[len(ordered) // 2], ordered[-1]]
    return list(dict.fromkeys(found))


def _size(shape: DraftShape) -> tuple[int, int, int]:
    return shape.eagle_topk, shape.num_draft_tokens, shape.num_steps


def rates_of(measured: Mapping[DraftShape, tuple[float, Sequence[float | None]]]) -> AcceptanceRates:
    """From acceptance lengths and rates by position of a few shapes: the deepest chain's rates, and what trees brought
    beyond them.
    """
    chains = [shape for shape in measured if shape.eagle_topk == 1] or list(measured)
    deepest = max(chains, key=lambda shape: shape.num_steps)
    length, by_position = measured[deepest]
    known = [rate for rate in by_position if rate is not None]
    width = max(shape.eagle_topk for shape in measured)
    if known and deepest.eagle_topk == 1:
        rates = AcceptanceRates.from_first(known, width)
    else:
        even = AcceptanceRates.from_length(min(length, deepest.num_steps + 1), deepest).by_rank[0][0]
        rates = AcceptanceRates.from_first([even], width)
    gains = [
        (told - 1) / (expected_tokens(shape, rates) - 1)
        for shape, (told, _) in measured.items()
        if shape.eagle_topk > 1 and expected_tokens(shape, rates) > 1
    ]
    return AcceptanceRates(rates.by_rank, tree=sum(gains) / len(gains) if gains else 1.0)


def predict(rates: Mapping[DraftShape, AcceptanceRates], costs: StepTable, concurrency: int) -> list[Estimate]:
    """Drafting nothing and every shape, the fastest first."""
    found: dict[DraftShape | None, Estimate] = {}
    for shape, known in rates.items():
        found |= {one.shape: one for one in best([shape], costs, known, sequences=concurrency, length=1)}
    return sorted(found.values(), key=lambda one: -one.speed)


def shortlist(predicted: Mapping[int, Sequence[Estimate]], keep: int) -> list[DraftShape]:
    """The ``keep`` most promising shapes of each concurrency."""
    found = [[one.shape for one in ranked if one.shape and one.speed][:keep] for ranked in predicted.values()]
    return list(dict.fromkeys(shape for shapes in found for shape in shapes))


# Who is left


Speeds = Mapping[Contender, Mapping[int, float]]  # tokens a second by concurrency


def survivors(speeds: Speeds, most: int) -> list[Contender]:
    """The ``most`` fastest at each concurrency, and the fastest that drafts nothing; in the order given."""
    kept: set[Contender] = set()
    for level in {level for by_level in speeds.values() for level in by_level}:
        ranked = sorted((one for one in speeds if level in speeds[one]), key=lambda one: -speeds[one][level])
        kept |= {*ranked[:most], *[one for one in ranked if one.plain][:1]}
    return [one for one in speeds if one in kept]


def chosen(speeds: Speeds) -> dict[int, Contender]:
    """The fastest at each concurrency, all of one variant: an engine is launched once."""
    levels = sorted({level for by_level in speeds.values() for level in by_level})
    by_variant: dict[Variant, dict[int, Contender]] = {}
    for variant in dict.fromkeys(one.variant for one in speeds):
        mine = [one for one in speeds if one.variant == variant and all(level in speeds[one] for level in levels)]
        if mine:
            by_variant[variant] = {level: max(mine, key=lambda one: speeds[one][level]) for level in levels}
    return max(by_variant.values(), key=lambda at: sum(math.log(speeds[one][level]) for level, one in at.items()))


def single(speeds: Speeds, variant: Variant) -> Contender:
    """The best of a variant at all concurrencies together."""
    mine = [one for one in speeds if one.variant == variant]
    return max(mine, key=lambda one: sum(map(math.log, speeds[one].values())))


# What engines read


@dataclass(frozen=True)
class Use:
    """``flags`` for the engine's command line, and ``files`` by name, which they may refer to."""

    flags: list[str] = field(default_factory=list)
    files: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def ranges(at: Mapping[int, T]) -> list[tuple[int, int, T]]:
    """Batch sizes, from 1 to the largest measured, that each choice is for: limits lie half-way, in logarithms."""
    levels = sorted(at)
    ends = [math.isqrt(low * high) for low, high in pairwise(levels)] + [levels[-1]]
    pieces = [(end, at[level]) for level, end in zip(levels, ends, strict=True)]
    found, begin = list[tuple[int, int, T]](), 1
    for _, same in groupby(pieces, key=lambda piece: piece[1]):
        end, choice = list(same)[-1]
        found.append((begin, end, choice))
        begin = end + 1
    return found


def for_vllm(
    config: Mapping[str, Any], at: Mapping[int, DraftShape | None], one: DraftShape | None, *, by_batch: bool
) -> Use:
    """``config`` is what was run, whatever it drafted. ``one`` is the best for all batches; ``by_batch``: this version
    can change with them.
    """
    counts = {level: shape.num_steps if shape else 0 for level, shape in at.items()}
    config, notes = dict(config), []
    if by_batch and len(set(counts.values())) > 1:
        config["num_speculative_tokens"] = max(counts.values())
        config["num_speculative_tokens_per_batch_size"] = [list(piece) for piece in ranges(counts)]
        notes = [
            "the table by batch size was put together from runs with fixed counts, and vLLM's first model runner "
            "captures no full CUDA graphs with it: run eyas bench with it before you trust it"
        ]
    elif one is None:
        return Use(notes=["draft nothing: launch it without --speculative-config"])
    else:
        config["num_speculative_tokens"] = one.num_steps
    # the flag takes JSON itself, not a file's name
    return Use(["--speculative-config", json.dumps(config)], {"speculative-config.json": config}, notes)


def for_sglang(drafter: str, at: Mapping[int, DraftShape | None], one: DraftShape | None, *, adaptive: bool) -> Use:
    start = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", drafter]
    chains = all(shape is None or shape.eagle_topk == 1 for shape in at.values())
    steps = {level: shape.num_steps if shape else 0 for level, shape in at.items()}
    if adaptive and chains and len(set(steps.values())) > 1:
        config = {str(low): {"candidate_steps": [count]} for low, _, count in ranges(steps)}
        flags = ["--speculative-num-steps", str(max(steps.values())), "--speculative-eagle-topk", "1"]
        flags += ["--speculative-num-draft-tokens", str(max(steps.values()) + 1)]
        flags += ["--speculative-adaptive", "--speculative-adaptive-config", "adaptive.json"]
        note = "the adaptive config was put together from runs with fixed steps: run eyas bench with it"
        return Use([*start, *flags], {"adaptive.json": config}, [f"{note} before you trust it"])
    if one is None:
        return Use(notes=["draft nothing: launch it without --speculative-algorithm"])
    return Use([*start, *sglang_shape(one)])


def sglang_shape(shape: DraftShape) -> list[str]:
    numbers = {
        "--speculative-num-steps": shape.num_steps,
        "--speculative-eagle-topk": shape.eagle_topk,
        "--speculative-num-draft-tokens": shape.num_draft_tokens,
    }
    return [part for flag, n in numbers.items() for part in (flag, str(n))]


def for_eyas(at: Mapping[int, Contender]) -> Use:
    """The engine takes one way at a time, or decides itself: flags for each concurrency."""
    spelled = {level: " ".join(eyas_flags(one)) for level, one in at.items()}
    if len(set(spelled.values())) == 1:
        return Use(next(iter(spelled.values())).split())
    return Use(notes=[f"at concurrency {level}: {flags}" for level, flags in spelled.items()])


def eyas_flags(one: Contender) -> list[str]:
    if one.shape is None:
        return ["--speculation", "auto" if one.auto else "off"]
    return ["--speculation", "fixed", *sglang_shape(one.shape)]


def room_for(shapes: Sequence[DraftShape]) -> DraftShape:
    """A draft as large as any of these, and as the one that the embedded engine takes by default."""
    every = [DraftShape(), *shapes]
    steps, width, tokens = (max(getattr(one, name) for one in every) for name in vars(every[0]))
    return DraftShape(steps, width, tokens)
