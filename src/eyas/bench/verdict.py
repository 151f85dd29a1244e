"""Does it pay? In one word for each level and task, and in one sentence for all; or why it cannot be judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from eyas.bench.facts import Facts, differences, model_differences
from eyas.bench.passes import SIDES, Level, Name
from eyas.bench.statistics import ENOUGH, Interval, crossing

Word = Literal["pays", "does not pay", "not shown"]
EXIT_CODES: dict[Word, int] = {"pays": 0, "does not pay": 4, "not shown": 3}
FAILURES = 0.01  # share of requests that failed above which nothing is shown


@dataclass(frozen=True)
class Found:
    """A level's speedup. ``shown`` is the 95% interval; ``held`` is the wider one that holds for all levels at once,
    and decides: or one of many levels would be wrong by chance.
    """

    level: Level
    shown: Interval
    held: Interval
    rounds: int
    failed: float = 0.0  # share of its requests

    def word(self, even: float = 1.0) -> Word:
        if self.rounds < ENOUGH or self.failed > FAILURES:
            return "not shown"
        if self.held.low > even:
            return "pays"
        return "does not pay" if self.held.high < even else "not shown"


@dataclass(frozen=True)
class Verdict:
    outcome: Word
    sentence: str
    break_even: float | None  # the concurrency where the speedup falls to 1, between two that were measured

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]


def judge(found: Sequence[Found], even: float = 1.0) -> Verdict:
    """It pays where it pays at every level asked for, and does not where at one it does not."""
    words = [one.word(even) for one in found]
    outcome: Word = "not shown"
    if all(word == "pays" for word in words):
        outcome = "pays"
    elif "does not pay" in words:
        outcome = "does not pay"
    place = None
    if found[0].level.kind == "concurrency":
        place = crossing([one.level.value for one in found], [one.shown.middle for one in found], even)
    return Verdict(outcome, _sentence(found, words, even), place)


def _sentence(found: Sequence[Found], words: Sequence[Word], even: float) -> str:
    kind = found[0].level.kind
    than = "" if even == 1 else f" (by {even:g}x or more)"
    groups = {word: [one for one, w in zip(found, words, strict=True) if w == word] for word in EXIT_CODES}
    if len(found) == 1 or len(set(words)) == 1:
        where = f"at {found[0].level}" if len(found) == 1 else f"at every {kind} measured"
        start = {"pays": "Speculation pays", "does not pay": "Speculation does not pay", "not shown": "It is not shown"}
        what = start[words[0]] + (" that speculation pays or does not" if words[0] == "not shown" else "")
        return f"{what} {where}{than}: {_speedups(found)}{_why(found, words[0])}."
    parts = [
        f"{word} at {kind} {', '.join(f'{one.level.value:g}' for one in ones)} ({_speedups(ones)}{_why(ones, word)})"
        for word, ones in groups.items()
        if ones
    ]
    return f"Speculation{than} {'; '.join(parts).replace('not shown at', 'is not shown to do either at')}."


def _speedups(found: Sequence[Found]) -> str:
    """The first and the last one."""
    ends = [found[0], found[-1]] if len(found) > 1 else [found[0]]
    return ", ".join(f"{one.shown}" + (f" at {one.level.value:g}" if len(found) > 1 else "") for one in ends)


def _why(found: Sequence[Found], word: Word) -> str:
    if word != "not shown":
        return ""
    if found[0].rounds < ENOUGH:
        return f"; {found[0].rounds} rounds are too few, {ENOUGH} are the least"
    failed = max(one.failed for one in found)
    return f"; {failed:.0%} of the requests failed" if failed > FAILURES else ""


# What cannot be judged


def refusals(without: Facts, with_: Facts, levels: Sequence[Level]) -> list[str]:
    """Why these two sides say nothing about speculation, each with what to do."""
    both = (without, with_)
    found = [f"The acceptance of {side.where} is simulated: {side.simulated}." for side in both if side.simulated]
    if without.speculates:
        found.append(
            f"The side without speculation ({without.where}) speculates itself: launch it without a drafter, or swap "
            "the two addresses."
        )
    if differ(without.engine, with_.engine, unknown="unknown"):
        found.append(f"The sides run different engines: {without.engine} without, {with_.engine} with.")
    found += _models(without, with_)
    if differ(without.context_length, with_.context_length):
        found.append(
            f"The sides have different limits: a context of {without.context_length:,} tokens without, "
            f"{with_.context_length:,} with."
        )
    found += _running(without, with_, levels)
    names = {*without.sampling, *with_.sampling}
    if other := sorted(name for name in names if without.sampling.get(name) != with_.sampling.get(name)):
        found.append(f"The sides sample differently by default: {', '.join(other)}.")
    return found


def differences_of(facts: Mapping[Name, Facts]) -> list[str]:
    """What can be judged, but should be known."""
    found = [f"{name} speculation: {note}" for name in SIDES for note in facts[name].notes]
    if facts["with"].speculates is False:
        found.append("neither side speculates, as far as they say: this compares two plain servers")
    versions = [facts[name].version for name in SIDES]
    if differ(*versions):
        found.append(f"the sides run different versions: {versions[0]} without, {versions[1]} with")
    caps = [facts[name].max_running_requests for name in SIDES]
    if differ(*caps):
        found.append(f"running requests are limited to {caps[0]} without and {caps[1]} with, which no level reaches")
    if other := differences(facts["without"], facts["with"]):
        found.append(f"the sides differ in more than speculation: {'; '.join(other)}")
    return found


def differ(one: object, other: object, unknown: object = None) -> bool:
    return unknown not in (one, other) and one != other


def _models(without: Facts, with_: Facts) -> list[str]:
    both = (without, with_)
    one, other = (side.model if without.model and with_.model else side.served for side in both)
    if one and other and _name(one) != _name(other):
        return [f"The sides run different models: {one} without, {other} with."]
    return [
        f"The sides run the model differently: {name} is {without.settings[name]} without, {with_.settings[name]} with."
        for name in model_differences(without, with_)
    ]


def _name(model: str) -> str:
    """A path and a hub's id of the same model end alike."""
    return PurePath(model.rstrip("/")).name.lower()


def _running(without: Facts, with_: Facts, levels: Sequence[Level]) -> list[str]:
    """A cap that no level reaches changes nothing; SGLang's of 48, when it speculates, is the one people meet."""
    caps = [without.max_running_requests, with_.max_running_requests]
    known = [cap for cap in caps if cap is not None]
    if len(known) < 2 or known[0] == known[1]:
        return []
    most = max(level.value if level.kind == "concurrency" else float("inf") for level in levels)
    if most <= min(known):
        return []
    return [
        f"The sides have different limits: {known[0]:,} running requests without, {known[1]:,} with (SGLang takes 48 "
        "where it speculates): launch both with the same --max-running-requests (vLLM: --max-num-seqs), or stay at a "
        f"--concurrency up to {min(known)}."
    ]
