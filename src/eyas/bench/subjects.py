"""What is tuned: the embedded engine, or an engine that is launched anew for each contender."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from eyas.bench import grid
from eyas.bench.facts import Facts
from eyas.bench.grid import Contender, StepTable, Use, Variant
from eyas.bench.launched import LaunchedSide, planned
from eyas.bench.pairing import check, mixed_up, one_pass
from eyas.bench.passes import BenchError, Level, Name
from eyas.bench.sides import Embedded, EngineSide, Say, Side, encoded
from eyas.bench.verdict import refusals
from eyas.bench.workload import chosen
from eyas.bridges.launch import Asked
from eyas.core import DraftShape, SamplingParams, UsageError
from eyas.engine.policy import Auto, BatchView, Decision, Fixed, Off, Policy, ladder
from eyas.speculation.cost import CONFIRMED, FORWARD, AcceptanceRates, CostModel

if TYPE_CHECKING:
    from eyas.bench.tune import Course
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
            self._engine.start()
            memo.keep("costs", [entry for level in levels for entry in await self._timed(course, level, shapes)])
        table = {(size, DraftShape(**shape) if shape else None): each for size, shape, each in memo.values["costs"]}
        rates = {
            DraftShape(**shape): AcceptanceRates(tuple(map(tuple, rows)), tree)
            for shape, rows, tree in memo.values["acceptance"]
        }
        return Surveyed(rates, StepTable(table))

    def _acceptance(self, course: Course) -> list[tuple[dict[str, int], Sequence[Sequence[float]], float]]:
        from eyas.drafter.eagle3 import Eagle3Drafter
        from eyas.training.evaluation import EVERYTHING, Evaluator

        pair, most = self.pair, self.pair.target.context_length or sys.maxsize
        assert isinstance(pair.drafter, Eagle3Drafter)
        asked = [encoded(pair, prompt) for prompt in mixed_up(course.workload)]
        prompts = [ids for ids in asked if len(ids) + self.sampling.max_tokens <= most][:ANSWERS]
        if not prompts:
            raise UsageError(f"No prompt and its answer fit a context of {most:,} tokens: lower --output-len.")
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
        self, course: Course, level: Level, shapes: Sequence[DraftShape]
    ) -> list[tuple[int, dict[str, int] | None, float]]:
        side = EngineSide("with", self._engine, self.sampling)
        survey, size = Survey(grid.surveyed(shapes), self._costs), int(level.value)
        self._engine.use(survey)
        course.report(f"timing steps at {level}")
        prompts = chosen(await course.prompts(side), max(size, FEW), 0)
        await check(side, await one_pass(side, prompts, 0, level, "survey"))
        bucket = max((view.bucket for view in survey.views), default=0)
        full = [view for view in survey.views if view.bucket == bucket]
        if self._costs.samples(FORWARD, bucket, 1) < CONFIRMED:
            raise BenchError(f"Too few steps at {level} to time them: ask for longer answers (--output-len).")
        rows = sorted(view.length for view in full)[len(full) // 2]
        times = {one: self._costs.step(one, bucket, rows) for one in (None, *shapes)}
        return [(size, asdict(one) if one else None, s) for one, s in times.items() if s is not None]

    async def on(self, contender: Contender, label: str, report: Say) -> tuple[Side, object]:
        self._engine.start()
        if contender not in self._policies:
            fixed = Fixed(contender.shape) if contender.shape else Off()
            self._policies[contender] = Auto(ladder(DraftShape())) if contender.auto else fixed  # as by default
        if contender != self._on:
            self._engine.use(self._policies[contender])
            self._on = contender
        return EngineSide("without" if contender.plain else "with", self._engine, self.sampling), None

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
            what = "Nothing is known of this drafter's acceptance, so nothing can be predicted."
            raise BenchError(f"{what} {course.reasons()}")
        rates = grid.rates_of(lengths)
        return Surveyed(dict.fromkeys(search.shapes, rates), StepTable(table))

    async def on(self, contender: Contender, label: str, report: Say) -> tuple[Side, object]:
        if (contender, label) == self._on and self._side is not None and await self._side.alive():
            return self._side, self._launches
        await self.close()
        found, variant = planned(self.asked, contender, self.running), contender.variant
        name: Name = "without" if contender.plain else "with"
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
        plan = planned(self.asked, Contender(one.shape, auto=one.plain), self.running)
        if self.asked.engine == "vllm":
            knows = plan.source.module("vllm.v1.spec_decode.dynamic.utils") is not None
            parallel = next((plan.flags[name] for name in ("data_parallel_size", "dp") if name in plan.flags), 1)
            config = plan.flags["speculative_config"]
            use = grid.for_vllm(config, shapes, one.shape, by_batch=knows and parallel == 1)
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
