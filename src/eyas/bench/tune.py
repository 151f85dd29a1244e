"""Finds how to draft: steps and acceptance are measured once, all shapes predicted, the most promising run in turn.

What is worked out is kept in a journal as it comes, so that whatever breaks off can go on.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any, Protocol

from eyas.bench import grid
from eyas.bench.facts import Facts
from eyas.bench.grid import Contender, StepTable, Use, Variant
from eyas.bench.journal import Memo
from eyas.bench.launched import LaunchedSide, Setting, free_port, planned
from eyas.bench.pairing import Plan, check, mixed_up, one_pass, warm_up
from eyas.bench.passes import BenchError, Level, Name, Pass, speed
from eyas.bench.results import finite
from eyas.bench.sides import Embedded, EngineSide, Say, Side
from eyas.bench.statistics import CONFIDENCE, speedup
from eyas.bench.verdict import Found, judge, refusals
from eyas.bench.workload import Workload, chosen
from eyas.bridges.launch import Asked
from eyas.core import DraftShape, EyasError, SamplingParams
from eyas.engine.policy import Auto, BatchView, Decision, Fixed, Off, Policy, ladder
from eyas.speculation.cost import CONFIRMED, FORWARD, AcceptanceRates, CostModel, Estimate

if TYPE_CHECKING:
    from eyas.engine.llm import LLM

ANSWERS = 16  # that acceptance is recorded along
FEW = 4  # answers at least, over which steps are timed
Rates = Mapping[DraftShape, AcceptanceRates]


@dataclass(frozen=True)
class Surveyed:
    """What predictions are made from: acceptance of every shape, and what steps take."""

    rates: Rates
    costs: StepTable


class Subject(Protocol):
    """What is tuned. ``launched``: each contender is a launch of its own, in which all levels follow one another."""

    launched: bool

    async def survey(self, course: Course) -> Surveyed: ...

    async def on(self, contender: Contender, label: str, report: Say) -> tuple[Side, object]:
        """Ready to be asked in the round of this name, and which launch this is. Raises EyasError where it is not."""

    def uses(self, at: Mapping[int, Contender], one: Contender) -> Use:
        """``at`` each concurrency the best, and ``one`` for all."""

    async def close(self) -> None: ...


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
        plan, prompts = self.search.plan, mixed_up(self.workload)
        if (launch, one, level) not in self._warm:
            await warm_up(side, prompts, plan, [level], lambda news: None)
            self._warm.add((launch, one, level))
        done = await one_pass(side, chosen(prompts, plan.count(level), turn), turn, level, "all")
        await check(side, done)
        return done

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
        speeds = self.speeds(alive, labels)
        rows, found = [], list[Found]()
        drafting = [one for one in speeds if not one.plain]
        family = max(len(drafting), 1) * len(self.search.plan.levels)
        for level in self.search.plan.levels:
            size = int(level.value)
            base = max((one for one in speeds if one.plain), key=lambda one: speeds[one][size])
            here = [self._row(one, base, level, labels, predicted[size], family) for one in speeds]
            rows += [row for row, _ in sorted(here, key=lambda pair: -pair[0]["tokens_per_second"])]
            drafts = [one for row, one in here if not row["plain"]]
            found += [max(drafts, key=lambda one: one.shown.middle)] if drafts else []
        at = grid.chosen(speeds)
        variant = next(iter(at.values())).variant
        use = self.subject.uses(at, grid.single(speeds, variant))
        gaps = [abs(row["apart"]) for row in rows if row["apart"] is not None]
        verdict = judge(found) if len(found) == len(self.search.plan.levels) else None
        return {
            "verdict": {
                "sentence": verdict.sentence if verdict else "No way of drafting ran: see what was dropped.",
                "exit_code": verdict.exit_code if verdict else 1,
            },
            "choice": {level: {**as_record(one), "speed": speeds[one][level]} for level, one in at.items()},
            "use": asdict(use),
            "measured": rows,
            "predicted": [
                {"concurrency": level, **asdict(one)} for level, ranked in predicted.items() for one in ranked
            ],
            "apart": median(gaps) if gaps else None,
            "dropped": [{**as_record(one), "reason": reason} for one, reason in self.dropped.items()],
            "rounds": len(labels),
        }

    def _row(
        self,
        one: Contender,
        base: Contender,
        level: Level,
        labels: Sequence[str],
        predicted: Sequence[Estimate],
        family: int,
    ) -> tuple[dict[str, Any], Found]:
        """Of a contender at a level, against the fastest there that drafts nothing; and what decides about it."""
        size = int(level.value)
        mine = [self.records(one, label)[size] for label in labels]
        pair = [each["speed"] for each in mine], [self.records(base, label)[size]["speed"] for label in labels]
        failed = sum(each["failed"] for each in mine) / sum(each["requests"] for each in mine)
        held = speedup(*pair, confidence=1 - (1 - CONFIDENCE) / family)
        found = Found(level, speedup(*pair), held, len(labels), failed)
        told = {each.shape: each.speed for each in predicted if each.speed}
        expected = told[one.shape] / told[None] if one.shape in told and None in told and not one.auto else None
        reference = Contender(variant=one.variant)
        plain = [self.records(reference, label)[size]["speed"] for label in labels if self.records(reference, label)]
        own = speedup(pair[0], plain).middle if len(plain) == len(labels) else None  # predictions are of one variant
        return {
            "concurrency": size,
            **as_record(one),
            "tokens_per_second": geometric_mean(pair[0]),
            "speedup": found.shown.middle,
            "low": found.shown.low,
            "high": finite(found.shown.high),
            "word": found.word() if not one.plain else "",
            "acceptance_length": next((each["length"] for each in reversed(mine) if each["length"]), None),
            "predicted": expected,
            "apart": own / expected - 1 if own and expected and one.shape else None,
        }, found


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


# The embedded engine


class Survey(Auto):
    """Goes through the shapes again and again, for what they cost."""

    def __init__(self, shapes: Sequence[DraftShape], costs: CostModel):
        super().__init__(shapes, costs)
        self.views: list[BatchView] = []
        self._turn = 0

    def decide(self, view: BatchView) -> Decision:
        self.views.append(view)
        self._turn += 1
        shape = (None, *self.shapes)[self._turn % (len(self.shapes) + 1)]
        fits = shape is not None and view.drafted and shape.num_steps < view.room
        return Decision(shape if fits else None, "surveyed")

    def follow(self) -> bool:
        return True


@dataclass
class InProcess:
    """The engine of this process. ``pair`` is loaded; ``make`` gives it an engine with room for what is tried."""

    pair: LLM
    make: Callable[[LLM], LLM]
    drafter: str
    sampling: SamplingParams
    launched: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._costs = CostModel()
        self._policies: dict[Contender, Policy] = {}
        self._on: Contender | None = None

    @cached_property
    def _engine(self) -> Embedded:
        """Made once acceptance is known: a drafter serves one engine at a time."""
        return Embedded(self.make(self.pair), self.drafter)

    async def survey(self, course: Course) -> Surveyed:
        """Acceptance along answers, and a pass at each level, whose steps take turns."""
        levels, shapes, memo = course.search.plan.levels, course.search.shapes, course.memo
        if "acceptance" not in memo.values:
            memo.keep("acceptance", self._acceptance(course))
        if "costs" not in memo.values:
            side = EngineSide("with", self._engine, self.sampling)
            await side.start()
            memo.keep("costs", [entry for level in levels for entry in await self._timed(side, course, level, shapes)])
        table = {(size, DraftShape(**shape) if shape else None): each for size, shape, each in memo.values["costs"]}
        rates = {
            DraftShape(**shape): AcceptanceRates(tuple(map(tuple, rows)), tree)
            for shape, rows, tree in memo.values["acceptance"]
        }
        return Surveyed(rates, StepTable(table))

    def _acceptance(self, course: Course) -> list[tuple[dict[str, int], Sequence[Sequence[float]], float]]:
        from eyas.drafter.eagle3 import Eagle3Drafter
        from eyas.training.evaluation import EVERYTHING, Evaluator, encode

        pair, most = self.pair, self.pair.target.context_length or sys.maxsize
        assert isinstance(pair.drafter, Eagle3Drafter)
        asked = [encode(pair, prompt.messages) for prompt in mixed_up(course.workload)]
        prompts = [ids for ids in asked if len(ids) + self.sampling.max_tokens <= most][:ANSWERS]
        evaluator = Evaluator(
            pair.target,
            pair.drafter,
            {EVERYTHING: prompts},
            pair.engine.eos_ids,
            lambda what, share: course.report(what),
        )
        _, answers = evaluator.measure(DraftShape(), self.sampling)
        found = evaluator.simulate(answers, course.search.shapes)
        return [(asdict(one.shape), one.rates.by_rank, one.rates.tree) for one in found]

    async def _timed(
        self, side: Side, course: Course, level: Level, shapes: Sequence[DraftShape]
    ) -> list[tuple[int, dict[str, int] | None, float]]:
        survey, size = Survey(grid.surveyed(shapes), self._costs), int(level.value)
        self._engine.use(survey)
        course.report(f"timing steps at {level}")
        prompts = chosen(mixed_up(course.workload), max(size, FEW), 0)
        await check(side, await one_pass(side, prompts, 0, level, "survey"))
        bucket = max((view.bucket for view in survey.views), default=0)
        full = [view for view in survey.views if view.bucket == bucket]
        if self._costs.samples(FORWARD, bucket, 1) < CONFIRMED:
            raise BenchError(f"Too few steps at {level} to time them: ask for longer answers (--output-len).")
        rows = sorted(view.length for view in full)[len(full) // 2]
        times = {one: self._costs.step(one, bucket, rows) for one in (None, *shapes)}
        return [(size, asdict(one) if one else None, s) for one, s in times.items() if s is not None]

    async def on(self, contender: Contender, label: str, report: Say) -> tuple[Side, object]:
        name: Name = "without" if contender.plain else "with"
        side = EngineSide(name, self._engine, self.sampling)
        await side.start()
        if contender != self._on:
            self._engine.use(self._policies.setdefault(contender, self._policy(contender)))
            self._on = contender
        return side, None

    def _policy(self, one: Contender) -> Policy:
        if one.auto:
            return Auto(ladder(DraftShape()))  # as it is by default
        return Fixed(one.shape) if one.shape else Off()

    def uses(self, at: Mapping[int, Contender], one: Contender) -> Use:
        return grid.for_eyas(at)

    async def close(self) -> None:
        if "_engine" in vars(self):
            self._engine.close()


# Servers


@dataclass
class Relaunched:
    """SGLang or vLLM, launched anew for each contender; one runs at a time."""

    asked: Asked
    sampling: SamplingParams
    running: int
    log: Path
    launched: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self._on: tuple[Contender, str] | None = None
        self._side: LaunchedSide | None = None
        self._launches = 0
        self._plain: dict[Variant, Facts] = {}
        self._levels = (Level("concurrency", self.running),)

    async def survey(self, course: Course) -> Surveyed:
        """A few shapes and no draft, each launched once."""
        search, label = course.search, "survey"
        shapes = grid.surveyed(search.shapes)
        contenders = [Contender(shape, search.variants[0]) for shape in (None, *shapes)]
        course.ahead += len(contenders) * len(search.plan.levels)
        await course.round(label, 0, contenders)
        told = {one: course.records(one, label) for one in contenders if one not in course.dropped}
        table, lengths = dict[tuple[int, DraftShape | None], float](), dict[DraftShape, tuple[float, list[Any]]]()
        for one, by_level in told.items():
            for level, each in by_level.items():
                length = each["length"] if one.shape else 1.0
                if each["per_token"] and length:
                    table[(level, one.shape)] = each["per_token"] * length
                if one.shape and length and level == min(by_level):
                    lengths[one.shape] = (length, each["rates"])
        if not lengths:
            dropped = "; ".join(f"{one}: {reason}" for one, reason in course.dropped.items())
            raise BenchError(f"Nothing is known of this drafter's acceptance, so nothing can be predicted. {dropped}")
        rates = grid.rates_of(lengths)
        return Surveyed(dict.fromkeys(search.shapes, rates), StepTable(table))

    async def on(self, contender: Contender, label: str, report: Say) -> tuple[Side, object]:
        if (contender, label) == self._on and self._side is not None and await self._side.alive():
            return self._side, self._launches
        await self.close()
        variant, drafts = contender.variant, not contender.plain
        setting = Setting(drafts, contender.shape, variant.flags, variant.variables)
        found = planned(self.asked, setting, free_port(), self.running)
        name: Name = "with" if drafts else "without"
        self._side = LaunchedSide(name, sampling=self.sampling, plan=found, log=self.log)
        facts = await self._side.start(report)
        if facts.simulated:
            raise BenchError(f"Its acceptance is simulated: {facts.simulated}.")
        if contender.plain:
            self._plain[variant] = facts
        elif variant in self._plain and (wrong := refusals(self._plain[variant], facts, self._levels)):
            raise BenchError(f"It cannot be compared with the same engine without drafts: {' '.join(wrong)}")
        self._on, self._launches = (contender, label), self._launches + 1
        return self._side, self._launches

    def uses(self, at: Mapping[int, Contender], one: Contender) -> Use:
        shapes = {level: each.shape for level, each in at.items()}
        plan = planned(self.asked, Setting(True, one.shape), free_port(), self.running)
        if self.asked.engine == "vllm":
            drafter = plan.flags["speculative_config"]["model"]
            knows = plan.source.module("vllm.v1.spec_decode.dynamic.utils") is not None
            parallel = next((plan.flags[name] for name in ("data_parallel_size", "dp") if name in plan.flags), 1)
            use = grid.for_vllm(drafter, shapes, one.shape, by_batch=knows and parallel == 1)
        else:
            knows = plan.source.module("sglang.srt.speculative.adaptive_spec_params") is not None
            use = grid.for_sglang(plan.flags["speculative_draft_model_path"], shapes, one.shape, adaptive=knows)
        variables = [f"set {name}={value}" for name, value in one.variant.variables]
        return Use([*use.flags, *one.variant.flags], use.files, [*variables, *use.notes])

    async def close(self) -> None:
        self._on = None
        if self._side is not None:
            await self._side.close()
            self._side = None


async def tune(
    subject: Subject, workload: Workload, search: Search, memo: Memo, report: Callable[[str], None]
) -> dict[str, Any]:
    """Runs a search, and ends what it started."""
    try:
        return await Course(subject, workload, search, memo, report).run()
    finally:
        await subject.close()
