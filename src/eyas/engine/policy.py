"""How much to draft: decided for every step, from what steps cost and what drafts have brought. Knows no tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from eyas.core import DraftShape
from eyas.engine.stats import PolicyStatistics, PolicyTally
from eyas.speculation.cost import (
    CONFIRMED,
    FORWARD,
    PROPOSE,
    REST,
    AcceptanceRates,
    CostModel,
    Estimate,
    best,
    expected_tokens,
)

EXPLORATION = 0.02  # of the time: steps that another choice was predicted to beat
MARGIN = 1.03  # a choice must promise so much more than the current one
FIRST, LAST = 64, 512  # steps from one look at another choice to the next: doubled each time it loses
LOOK = 6  # drafts that make a look at the drafter
HOPELESS = 1.1  # tokens per step that no draft is worth

PRIOR, PRIOR_WEIGHT = 0.6, 3.0  # the rate that a drafter is believed to have, and drafts that speak for it
DEEPER_WEIGHT = 4.0  # drafts that say: a position is as good as the one before it
MEMORY, TREE_MEMORY, RECENT = 300, 50, 20  # drafts after which evidence has lost two thirds of its weight

Options = dict[DraftShape | None, Estimate]  # fastest first


@dataclass(frozen=True)
class BatchView:
    """What the next step runs on."""

    sequences: int  # that run
    bucket: int  # that are computed
    length: int  # rows of the cache that are looked at
    drafted: int  # sequences that can be drafted for: those the drafter follows
    room: int  # tokens that any of them may still emit


@dataclass(frozen=True)
class Decision:
    shape: DraftShape | None  # None: a plain step
    reason: str
    explores: bool = False  # another choice was predicted to be faster
    follow: bool = True  # the drafter shall keep up with those it follows, should this step be plain


@dataclass(frozen=True)
class StepReport:
    """What came of it. Of the cost model: ``B``, ``T`` tokens per sequence, ``S`` rows; a plain step has T 1."""

    decision: Decision
    B: int
    T: int
    S: int
    propose_seconds: float  # the drafter's whole share: what it is told, what it proposes
    verify_seconds: float
    rest_seconds: float
    draft_depth: int  # steps that were really drafted; 0: none
    reached: Sequence[int]  # [depth]: drafts that were still right when it came to this position
    accepted: Sequence[int]  # [depth]: and were right there too
    emitted: int  # tokens of all sequences

    @property
    def seconds(self) -> float:
        return self.propose_seconds + self.verify_seconds + self.rest_seconds


class Policy(Protocol):
    """Decides before every decoding step and is told after it what came of it."""

    shapes: Sequence[DraftShape]  # that it may ask for

    def decide(self, view: BatchView) -> Decision: ...

    def observe(self, report: StepReport) -> None: ...

    def follow(self) -> bool:
        """Whether the next new prompt shall be fed to the drafter."""

    def statistics(self) -> PolicyStatistics: ...


class Fixed:
    """Always this shape, or as much of it as there is room for; ``Off`` is its plain case."""

    def __init__(self, shape: DraftShape | None):
        self.shape = shape
        self.shapes: Sequence[DraftShape] = (shape,) if shape else ()
        self._tally = PolicyTally()

    def decide(self, view: BatchView) -> Decision:
        shape = limited(self.shape, view.room - 1) if self.shape and view.drafted else None
        reason = "speculation is off" if not self.shape else "as asked for" if shape else "nothing to draft for"
        return Decision(shape, f"{describe(shape)}: {reason}", follow=self.follow())

    def observe(self, report: StepReport) -> None:
        _count(self._tally, report)

    def follow(self) -> bool:
        return self.shape is not None

    def statistics(self) -> PolicyStatistics:
        return self._tally.statistics({})


class Off(Fixed):
    """Plain decoding only."""

    def __init__(self) -> None:
        super().__init__(None)


class Auto:
    """The choice that promises the most tokens per second, plain decoding among them.

    ``shapes`` are what may be drafted (``ladder`` makes them), ``costs`` what is known of the machine. Costs and
    acceptance outlive requests. Other choices are looked at again in bursts of a few steps, ever more rarely while they
    lose. The same observations lead to the same decisions.
    """

    def __init__(self, shapes: Sequence[DraftShape], costs: CostModel | None = None):
        self.shapes: Sequence[DraftShape] = tuple(shapes)
        self.costs = costs or CostModel()
        self.evidence = Evidence()
        self._depth = max((shape.num_steps for shape in self.shapes), default=0)
        self._width = max((shape.eagle_topk for shape in self.shapes), default=1)
        self._tally = PolicyTally()
        self._estimates: list[Estimate] = []
        self._current: dict[int, DraftShape | None] = {}  # by batch size
        self._looks: dict[tuple[int, str], _Look] = {}
        self._burst: _Burst | None = None
        self._bucket = 1
        self._worthwhile = True  # to draft, if all sequences were followed
        self._draft_seconds = 0.0  # of the best drafting step
        self._prompts = self._probed = 0  # new prompts since drafting is not worthwhile, and those fed to the drafter

    def decide(self, view: BatchView) -> Decision:
        rates, size = self.evidence.rates(self._depth, self._width), {"bucket": view.bucket, "length": view.length}
        everyone = best(self.shapes, self.costs, rates, sequences=view.sequences, **size)
        self._bucket = view.bucket
        self._worthwhile = bool(self.shapes) and (everyone[0].shape is not None or not self._knows_drafter)
        self._draft_seconds = next((e.seconds for e in everyone if e.shape and e.seconds), 0.0)
        shapes = [shape for shape in self.shapes if view.drafted and shape.num_steps < view.room]
        options = everyone
        if len(shapes) < len(self.shapes) or view.drafted < view.sequences:
            options = best(shapes, self.costs, rates, sequences=view.sequences, drafted=view.drafted, **size)
        self._estimates = options
        shape, explores, why = self._choose(view, {estimate.shape: estimate for estimate in options})
        return Decision(shape, self._reason(shape, why), explores, follow=self._worthwhile or self._burst is not None)

    def observe(self, report: StepReport) -> None:
        _count(self._tally, report)
        self.costs.record(FORWARD, report.B, report.T, report.S, report.verify_seconds)
        self.costs.record(REST, report.B, report.T, 0, report.rest_seconds)
        shape = report.decision.shape
        if shape and report.draft_depth:
            rows = report.B * shape.eagle_topk
            self.costs.record(PROPOSE, rows, report.draft_depth, report.S, report.propose_seconds)
            self.evidence.observe(shape, report.reached, report.accepted)
        if self._burst and self._burst.shape == shape:
            self._burst.steps += 1
            self._burst.drafts += report.reached[0] if report.reached else 0

    def follow(self) -> bool:
        """While drafting is not worthwhile: at most every eighth prompt, when a look at the drafter is due."""
        if self._worthwhile:
            self._prompts = self._probed = 0
            return True
        self._prompts += 1
        look = self._look(self._bucket, "drafting")
        if not self.shapes or not self._due(look, LOOK * self._draft_seconds) or 8 * self._probed >= self._prompts:
            return False
        self._probed += 1
        return True

    def statistics(self) -> PolicyStatistics:
        return self._tally.statistics({describe(e.shape): e.speed for e in self._estimates if e.speed})

    def _choose(self, view: BatchView, options: Options) -> tuple[DraftShape | None, bool, str]:
        """The shape, whether it is against the prediction, and what there is to say of that."""
        if len(options) == 1:
            return None, False, "nothing to draft for"
        if self.costs.samples(FORWARD, view.bucket, 1) < CONFIRMED:
            return None, self._knows_drafter and self._favourite(view, options) is not None, "measured first"
        if self._burst is None and not self._knows_drafter:
            # Of a large batch one step of one token says as much, and costs less.
            depth = 3 if view.bucket <= 4 else 1
            self._burst = _Burst(min(options, key=lambda s: abs(s.num_steps + s.eagle_topk - 1 - depth) if s else 99))
        chosen = self._favourite(view, options)
        if self._burst and self._burst.over(options):
            self._settle(self._burst, chosen)
        if self._burst is None:
            self._burst = self._next_burst(view, options, chosen)
        if self._burst and self._burst.shape in options:
            against = self._knows_drafter and self._burst.shape != chosen
            return self._burst.shape, against, "to see whether it is better" if against else ""
        return chosen, False, ""

    def _favourite(self, view: BatchView, options: Options) -> DraftShape | None:
        """The fastest; the current one as long as that is hardly better, and plain decoding is not."""
        leader = next(iter(options))
        current = self._current.setdefault(view.bucket, None)
        if current not in options:
            return leader
        speed = options[current].speed
        if options[leader].speed > MARGIN * speed or speed < options[None].speed:
            self._current[view.bucket] = leader
        return self._current[view.bucket]

    def _next_burst(self, view: BatchView, options: Options, chosen: DraftShape | None) -> _Burst | None:
        """A look at another choice, if it is time for one and there is time for it.

        Off plain decoding: at the best draft. Off a draft: at plain decoding, at a step less or more, and at the best
        tree (off a chain) or chain (off a tree). What has waited longest comes first.
        """
        drafts: list[DraftShape | None] = [shape for shape in options if shape]
        if chosen is None:
            looks = [(self._look(view.bucket, "drafting"), drafts[0])]
        else:
            kin = [shape for shape in self.shapes if shape in options and shape.eagle_topk == chosen.eagle_topk]
            at = kin.index(chosen)
            strangers = [shape for shape in drafts if shape not in kin]
            others = [None, *kin[max(at - 1, 0) : at], *kin[at + 1 : at + 2], *strangers[:1]]
            looks = [(self._look(view.bucket, describe(shape)), shape) for shape in others]
        look, shape = min(looks, key=lambda pair: pair[0].due)
        steps = max(CONFIRMED, math.ceil(LOOK / view.drafted)) if chosen is None else CONFIRMED
        if not self._due(look, steps * (options[shape].seconds or 0.0)):
            return None
        if chosen is None:
            self.evidence.doubt()
        return _Burst(shape, look, LOOK if chosen is None else 0)

    def _look(self, bucket: int, what: str) -> _Look:
        return self._looks.setdefault((bucket, what), _Look(self._tally.steps + FIRST))

    def _due(self, look: _Look, seconds: float) -> bool:
        affordable = self._tally.explored + seconds <= EXPLORATION * self._tally.seconds
        return look.due <= self._tally.steps and affordable

    def _settle(self, burst: _Burst, chosen: DraftShape | None) -> None:
        self._burst = None
        if burst.look:
            won = chosen is not None if burst.least else chosen == burst.shape
            burst.look.interval = FIRST if won else min(2 * burst.look.interval, LAST)
            burst.look.due = self._tally.steps + burst.look.interval

    @property
    def _knows_drafter(self) -> bool:
        return self.costs.knows(PROPOSE)

    def _reason(self, shape: DraftShape | None, why: str) -> str:
        found = {estimate.shape: estimate for estimate in self._estimates}
        plain, mine = found[None], found[shape]
        told = [why] if why else []
        if shape and mine.seconds and plain.seconds:
            told.append(f"{mine.tokens:.1f} tokens/step at {mine.seconds / plain.seconds:.2f}x")
            told.append(f"predicted {mine.speed / plain.speed:.2f}x plain")
        elif shape:
            told.append("not measured yet")
        elif not why and (rival := next((e for e in self._estimates if e.shape), None)):
            told.append(f"{describe(rival.shape)} would be {rival.speed / plain.speed:.2f}x")
        return f"{describe(shape)}: {', '.join(told)}"


class Evidence:
    """Live acceptance: the recent drafts, by depth, and what trees brought over what chains let expect."""

    def __init__(self) -> None:
        self._reached, self._accepted = [PRIOR_WEIGHT], [PRIOR * PRIOR_WEIGHT]
        self._recent = (0.0, 0.0)  # the last drafts at the first position: reached, accepted
        self._tree = (PRIOR_WEIGHT, PRIOR_WEIGHT)  # hits of trees: expected, seen

    def observe(self, shape: DraftShape, reached: Sequence[int], accepted: Sequence[int]) -> None:
        """Counts of one verify step by depth, over all sequences that were drafted for."""
        if not reached or reached[0] == 0:
            return
        if shape.eagle_topk > 1:
            self._observe_tree(shape, reached, accepted)
        else:
            self._add(reached, accepted)
            keep = math.exp(-reached[0] / RECENT)
            self._recent = (keep * self._recent[0] + reached[0], keep * self._recent[1] + accepted[0])
            self._believe_change()

    def rates(self, depth: int, width: int) -> AcceptanceRates:
        """Rounded to whole percents: so the same ones come again, and need not be worked out again."""
        first: list[float] = []
        for i in range(depth):
            reached, accepted = (self._reached[i], self._accepted[i]) if i < len(self._reached) else (0.0, 0.0)
            if i:
                reached, accepted = reached + DEEPER_WEIGHT, accepted + DEEPER_WEIGHT * first[-1]
            first.append(accepted / reached)
        expected, seen = self._tree
        tree = (seen + 0.5) / (expected + 0.5)
        return AcceptanceRates.from_first([round(rate, 2) for rate in first], width, round(tree, 2))

    def doubt(self) -> None:
        """Old evidence shall count no more than a first guess: a new look decides."""
        self._scale(min(1.0, PRIOR_WEIGHT / self._reached[0]))
        share = min(1.0, PRIOR_WEIGHT / self._tree[0])
        self._tree = (share * self._tree[0], share * self._tree[1])
        self._recent = (0.0, 0.0)

    def _add(self, reached: Sequence[float], accepted: Sequence[float]) -> None:
        self._scale(math.exp(-reached[0] / MEMORY))
        for counts, news in ((self._reached, reached), (self._accepted, accepted)):
            counts.extend([0.0] * (len(news) - len(counts)))
            for depth, count in enumerate(news):
                counts[depth] += count

    def _observe_tree(self, shape: DraftShape, reached: Sequence[int], accepted: Sequence[int]) -> None:
        """Counts say whether any child was right; how much of it was the first one's is what the model says."""
        rates = self.rates(shape.num_steps, shape.eagle_topk)
        modelled = expected_tokens(shape, AcceptanceRates(rates.by_rank)) - 1
        keep = math.exp(-reached[0] / TREE_MEMORY)
        self._tree = (keep * self._tree[0] + reached[0] * modelled, keep * self._tree[1] + sum(accepted))
        first = [row[0] / max(sum(row) * rates.tree, row[0], 1e-6) for row in rates.by_rank]
        self._add(reached, [share * count for share, count in zip(first, accepted, strict=False)])

    def _believe_change(self) -> None:
        """When the last drafts contradict the long memory, they are what counts."""
        reached, accepted = self._recent
        rate, recent = self._accepted[0] / self._reached[0], accepted / reached
        doubt = math.sqrt(max(rate * (1 - rate), 0.05) / reached)
        if reached >= 8 and abs(recent - rate) > 3 * doubt:
            self._scale(min(1.0, reached / self._reached[0]))
            self._reached[0], self._accepted[0] = reached, accepted

    def _scale(self, share: float) -> None:
        self._reached = [share * count for count in self._reached]
        self._accepted = [share * count for count in self._accepted]


@dataclass
class _Look:
    """When another choice is looked at again."""

    due: int
    interval: int = FIRST


@dataclass
class _Burst:
    """A few steps of one choice in a row: a single one may have been disturbed."""

    shape: DraftShape | None
    look: _Look | None = None  # None: the very first drafts
    least: int = 0  # drafts it takes
    steps: int = 0
    drafts: int = 0

    def over(self, options: Options) -> bool:
        if self.drafts < self.least:
            return False
        estimate = options.get(self.shape)
        hopeless = self.steps > 0 and estimate is not None and self.shape and estimate.tokens < HOPELESS
        return self.steps >= CONFIRMED or bool(hopeless)


def _count(tally: PolicyTally, report: StepReport) -> None:
    decision = report.decision
    tally.add(describe(decision.shape), decision.reason, report.emitted, report.seconds, explored=decision.explores)


def describe(shape: DraftShape | None) -> str:
    if shape is None:
        return "plain"
    if shape.eagle_topk == 1:
        return f"chain of {shape.num_steps}"
    return f"tree of {shape.num_draft_tokens} ({shape.num_steps} steps, top-k {shape.eagle_topk})"


def limited(shape: DraftShape, steps: int) -> DraftShape | None:
    """``shape`` with at most ``steps`` steps; None where that is none."""
    if steps >= shape.num_steps:
        return shape
    if steps < 1:
        return None
    most = DraftShape.most_tokens(steps, shape.eagle_topk)
    return DraftShape(steps, shape.eagle_topk, min(shape.num_draft_tokens, most))


def ladder(shape: DraftShape) -> tuple[DraftShape, ...]:
    """What ``Auto`` may choose from: chains up to ``num_steps`` (beyond eight not all), the tree and shallower ones."""
    lengths, last = [], 0
    while last < shape.num_steps:
        last = min(max(last + 1, last + last // 4), shape.num_steps)
        lengths.append(last)
    chains = [DraftShape(steps, 1, steps + 1) for steps in lengths]
    trees = [limited(shape, steps) for steps in lengths] if shape.eagle_topk > 1 else []
    return (*chains, *(tree for tree in trees if tree))
