"""Finds how to draft: steps and acceptance are measured once, all shapes predicted, the most promising run in turn.

What is worked out is kept in a journal as it comes, so that whatever breaks off can go on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import geometric_mean, median
from typing import Any

from eyas.bench import grid
from eyas.bench.grid import Contender, Variant
from eyas.bench.journal import Memo
from eyas.bench.pairing import Plan, check, fitting, mixed_up, one_pass, warm_up
from eyas.bench.passes import BenchError, Level, Pass, speed
from eyas.bench.results import finite
from eyas.bench.sides import Say, Side
from eyas.bench.statistics import CONFIDENCE, speedup
from eyas.bench.subjects import Subject
from eyas.bench.verdict import Found, judge
from eyas.bench.workload import Prompt, Workload, chosen
from eyas.core import DraftShape, EyasError
from eyas.speculation.cost import Estimate


@dataclass(frozen=True)
class Search:
    """``keep``: how many of each concurrency are run for all rounds of ``plan``, beside drafting nothing."""

    shapes: tuple[DraftShape, ...]
    variants: tuple[Variant, ...]
    plan: Plan
    keep: int = 2
    auto: bool = False  # the embedded engine's own choice takes part

    @property
    def reference(self) -> Contender:
        return Contender(variant=self.variants[0])

    def contenders(self, shapes: Sequence[DraftShape]) -> list[Contender]:
        found = [Contender(shape, variant) for variant in self.variants for shape in (None, *shapes)]
        return [*found, Contender(auto=True)] if self.auto else found


@dataclass
class Course:
    """A search under way."""

    subject: Subject
    workload: Workload
    search: Search
    memo: Memo
    report: Say = lambda what: None
    dropped: dict[Contender, str] = field(default_factory=dict)
    ahead: int = 0  # passes, at most
    _warm: set[object] = field(default_factory=set)
    _taken: list[float] = field(default_factory=list)  # seconds of passes

    async def run(self) -> dict[str, Any]:
        """Everything that was found. Raises BenchError where not even the engine without drafts runs."""
        search, levels = self.search, self.search.plan.levels
        self.ahead = len(search.variants) * (1 + search.keep * len(levels)) * len(levels) * search.plan.rounds
        found = await self.subject.survey(self)
        predicted = {int(one.value): grid.predict(found.rates, found.costs, int(one.value)) for one in levels}
        alive = search.contenders(grid.shortlist(predicted, search.keep))
        most, rung = len(alive), 0
        while len(search.variants) > 1 and most > search.keep + 1:
            self.ahead, rung = len(levels) * len(alive) * (2 + search.plan.rounds), rung + 1
            await self.round(f"rung {rung}", rung, alive)
            speeds = self.speeds(alive, [f"rung {rung}"])
            most = max(search.keep + 1, math.ceil(min(most, len(speeds)) / 2))
            alive = grid.survivors(speeds, most)
        rounds = [f"round {turn + 1}" for turn in range(search.plan.rounds)]
        self.ahead = len(levels) * len(alive) * len(rounds)
        for turn, label in enumerate(rounds):
            await self.round(label, turn, alive)
        return self.results(alive, rounds, predicted)

    async def round(self, label: str, turn: int, contenders: Sequence[Contender]) -> None:
        """All of them at all levels, each round beginning with another one."""
        first = turn % len(contenders)
        turned, levels = [*contenders[first:], *contenders[:first]], self.search.plan.levels
        places = [(one, level) for one in turned for level in levels]
        if not self.subject.launched:
            places = [(one, level) for level in levels for one in turned]
        for one, level in places:
            await self.once(label, turn, one, level)

    async def once(self, label: str, turn: int, one: Contender, level: Level) -> None:
        """One pass, unless it is in the journal. Who does not start or dies is dropped, and why is kept."""
        self.ahead -= 1
        if (reason := self.memo.values.get(f"dropped/{one}")) is not None:
            self.dropped[one] = reason
        plain = Contender(variant=one.variant)
        if one in self.dropped or plain in self.dropped or self.key(label, one, level) in self.memo.values:
            return
        self.report(f"{label}: {one} at {level}{self._left()}")
        begin = time.perf_counter()
        try:
            done = await self._measured(label, turn, one, level)
        except EyasError as error:
            if one == self.search.reference:
                raise
            self.dropped[one] = str(error)
            return self.memo.keep(f"dropped/{one}", str(error))
        self._taken.append(time.perf_counter() - begin)
        self.memo.keep(self.key(label, one, level), record(done))

    async def _measured(self, label: str, turn: int, one: Contender, level: Level) -> Pass:
        side, launch = await self.subject.on(one, label, self.report)
        plan, prompts = self.search.plan, await self.prompts(side)
        if (launch, one, level) not in self._warm:
            await warm_up(side, prompts, plan, [level], lambda news: None)
            self._warm.add((launch, one, level))
        done = await one_pass(side, chosen(prompts, plan.count(level), turn), turn, level, "all")
        await check(side, done)
        return done

    async def prompts(self, side: Side) -> list[Prompt]:
        """Of all tasks in turn, those that the first side which is asked can take."""
        if "prompts" not in self.memo.values:  # kept, so that all contenders of a round have the same
            fit = await fitting([side], self.workload, self.search.plan)
            self.memo.keep("prompts", [[prompt.key for prompt in mixed_up(fit)], fit.left_out])
        known = {prompt.key: prompt for prompt in mixed_up(self.workload)}
        return [known[key] for key in self.memo.values["prompts"][0]]

    def key(self, label: str, one: Contender, level: Level) -> str:
        return f"{label}/{one}/{level.value:g}"

    def _left(self) -> str:
        if not self._taken:
            return ""
        seconds = sum(self._taken) / len(self._taken) * (self.ahead + 1)
        return f", {seconds / 60:.0f} min left at most" if seconds >= 90 else f", {seconds:.0f} s left at most"

    def records(self, one: Contender, label: str) -> dict[int, dict[str, Any]]:
        """What was measured of it, by concurrency."""
        levels = self.search.plan.levels
        found = {int(level.value): self.memo.values.get(self.key(label, one, level)) for level in levels}
        return {level: value for level, value in found.items() if value is not None}

    def speeds(self, contenders: Sequence[Contender], labels: Sequence[str]) -> dict[Contender, dict[int, float]]:
        """Geometric means over rounds, as speedups are, of who is still there."""
        found: dict[Contender, dict[int, float]] = {}
        for one in contenders:
            told = [self.records(one, label) for label in labels]
            whole = all(len(each) == len(self.search.plan.levels) for each in told)
            if whole and one not in self.dropped and Contender(variant=one.variant) not in self.dropped:
                found[one] = {level: geometric_mean(each[level]["speed"] for each in told) for level in told[0]}
        return found

    # What it comes to

    def results(
        self, alive: Sequence[Contender], labels: Sequence[str], predicted: Mapping[int, Sequence[Estimate]]
    ) -> dict[str, Any]:
        speeds, levels = self.speeds(alive, labels), self.search.plan.levels
        plain = [one for one in speeds if one.plain]
        if not plain:
            raise BenchError(f"No engine without drafts ran all rounds. {self.reasons()}")
        rows, found = list[dict[str, Any]](), list[Found]()
        compared = max(len(speeds) - len(plain), 1) * len(plain) * len(levels)
        for level in levels:
            size = int(level.value)
            base = max(plain, key=lambda one: speeds[one][size])
            judged = {one: self._found(one, base, level, labels, compared) for one in speeds}
            told = {each.shape: each.speed for each in predicted[size] if each.speed}
            ordered = sorted(speeds, key=lambda one: -speeds[one][size])
            rows += [self._row(one, judged[one], labels, speeds, told) for one in ordered]
            drafts = [judged[one] for one in speeds if not one.plain]
            found += [max(drafts, key=lambda one: one.shown.middle)] if drafts else []
        at = grid.chosen(speeds)
        one = grid.single(speeds, next(iter(at.values())).variant)
        gaps = [abs(row["apart"]) for row in rows if row["apart"] is not None]
        verdict = judge(found) if found else None
        return {
            "verdict": {
                "sentence": verdict.sentence if verdict else "No way of drafting ran: see what was dropped.",
                "exit_code": verdict.exit_code if verdict else 1,
            },
            "choice": {level: {**as_record(one), "speed": speeds[one][level]} for level, one in at.items()},
            "use": asdict(self.subject.uses(at, one)),
            "measured": rows,
            "predicted": [
                {"concurrency": level, **asdict(one)} for level, ranked in predicted.items() for one in ranked
            ],
            "apart": median(gaps) if gaps else None,
            "dropped": [{**as_record(one), "reason": reason} for one, reason in self.dropped.items()],
            "rounds": len(labels),
            "notes": replace(self.workload, left_out=tuple(self.memo.values["prompts"][1])).notes,
        }

    def _found(self, one: Contender, base: Contender, level: Level, labels: Sequence[str], compared: int) -> Found:
        """A contender against the fastest that drafts nothing there; ``compared``: so many pairs are looked at."""
        mine, its = ([self.records(each, label)[int(level.value)] for label in labels] for each in (one, base))
        pair = [each["speed"] for each in mine], [each["speed"] for each in its]
        held = speedup(*pair, confidence=1 - (1 - CONFIDENCE) / compared)
        failed = [sum(each["failed"] for each in side) / sum(each["requests"] for each in side) for side in (mine, its)]
        return Found(level, speedup(*pair), held, len(labels), max(failed))

    def _row(
        self,
        one: Contender,
        found: Found,
        labels: Sequence[str],
        speeds: grid.Speeds,
        told: Mapping[DraftShape | None, float],
    ) -> dict[str, Any]:
        """``told``: predicted speeds, which are of one variant: how far apart is said of the contender's own."""
        size, plain = int(found.level.value), Contender(variant=one.variant)
        lengths = [self.records(one, label)[size]["length"] for label in labels]
        expected = told[one.shape] / told[None] if one.shape in told and None in told and not one.auto else None
        apart = None
        if expected and one.shape and plain in speeds:
            apart = speeds[one][size] / speeds[plain][size] / expected - 1
        return {
            "concurrency": size,
            **as_record(one),
            "tokens_per_second": speeds[one][size],
            "speedup": found.shown.middle,
            "low": found.shown.low,
            "high": finite(found.shown.high),
            "word": "" if one.plain else found.word(),
            "acceptance_length": next((length for length in reversed(lengths) if length), None),
            "predicted": expected,
            "apart": apart,
        }

    def reasons(self) -> str:
        """Why contenders were dropped."""
        return "; ".join(f"{one}: {reason}" for one, reason in self.dropped.items())


def record(done: Pass) -> dict[str, Any]:
    """What is kept of a pass."""
    known = done.speculation
    per_token = [answer.per_token for answer in done.good if answer.per_token]
    return {
        "speed": speed([done]),
        "per_token": sum(per_token) / len(per_token) if per_token else None,
        "length": known.acceptance_length if known else None,
        "rates": list(known.acceptance_rates or ()) if known else [],
        "requests": len(done.answers),
        "failed": len(done.failed),
    }


def as_record(one: Contender) -> dict[str, Any]:
    shape = asdict(one.shape) if one.shape else None
    variant = {"flags": list(one.variant.flags), "variables": dict(one.variant.variables)}
    return {"name": str(one), "plain": one.plain, "auto": one.auto, "shape": shape, **variant}


async def tune(
    subject: Subject, workload: Workload, search: Search, memo: Memo, report: Callable[[str], None]
) -> dict[str, Any]:
    """Runs a search, and ends what it started."""
    try:
        return await Course(subject, workload, search, memo, report).run()
    finally:
        await subject.close()
