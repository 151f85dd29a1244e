"""Both sides in turn: pairs of passes right after one another, in rounds that begin with the other side each time.

What drifts slowly (heat, clocks, neighbours) meets both sides of a pair alike, and what the second one of a pair has of
it cancels over the rounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from eyas.bench import load
from eyas.bench.journal import Journal
from eyas.bench.passes import SIDES, Answer, BenchError, Heard, Level, Name, Pair, Pass
from eyas.bench.sides import Side
from eyas.bench.workload import Prompt, Workload, chosen
from eyas.core import EyasError, SamplingParams

ROUNDS = 10
ARRIVING = 30.0
FULL = 0.8  # of a concurrency: where fewer run on average, it is said
PATIENCE = 3  # times that a server is looked for before it is given up, a second apart


@dataclass(frozen=True)
class Plan:
    """What is measured. ``num_prompts`` of each task in each pass; None: five for each that runs at a time, so that its
    slow end weighs little; at a request rate what arrives in about ``ARRIVING`` seconds.

    ``warmup`` passes of each side and level do not count. ``blocks``: each round is a block of its own, for which both
    sides start anew and one of them runs at a time; then the other one begins the next.
    """

    levels: tuple[Level, ...]
    sampling: SamplingParams
    rounds: int = ROUNDS
    num_prompts: int | None = None
    warmup: int = 1
    blocks: bool = False

    def count(self, level: Level) -> int:
        if self.num_prompts is not None:
            return self.num_prompts
        if level.kind == "concurrency":
            return round(5 * level.value)
        return max(16, round(ARRIVING * level.value))

    def as_record(self) -> dict[str, Any]:
        return asdict(self)

    def lasting(self) -> dict[str, Any]:
        """What a run that is resumed must have in common with its beginning: there may be more rounds."""
        return {name: value for name, value in self.as_record().items() if name != "rounds"}


@dataclass(frozen=True)
class Progress:
    """What has just been done, and all pairs so far."""

    turn: int
    rounds: int
    level: Level
    task: str
    share: float  # of everything
    pairs: Sequence[Pair]


Report = Callable[[str | Progress], None]


async def fitting(sides: Sequence[Side], workload: Workload, plan: Plan) -> Workload:
    """Without the prompts that a side cannot take; of a long list only as many as there will be asked."""
    enough = plan.rounds * max(map(plan.count, plan.levels))
    kept = {task: list(prompts) for task, prompts in workload.prompts.items()}
    wrong: dict[str, list[str]] = {}
    for side in sides:
        for task, prompts in kept.items():
            kept[task] = []
            for prompt in prompts:
                if len(kept[task]) == enough:
                    break
                if why := await side.room(prompt):
                    wrong.setdefault(why, []).append(prompt.key)
                else:
                    kept[task].append(prompt)
    named = [
        f"{len(keys)} {why} ({', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''})" for why, keys in wrong.items()
    ]
    return workload.only(kept, named)


async def measure(
    sides: Mapping[Name, Side], workload: Workload, plan: Plan, journal: Journal, report: Report = lambda news: None
) -> list[Pair]:
    """Warm-up, then the rounds that are not in the journal yet. All pairs, in order.

    Raises BenchError where a side is gone: the journal holds what was measured.
    """
    cells = [(level, task) for level in plan.levels for task in workload.prompts]
    places = [(turn, level, task) for turn in range(plan.rounds) for level, task in cells]
    missing = [place for place in places if place not in journal.pairs]
    mixed, passes = mixed_up(workload), 2 * (len(places) - len(missing))
    if missing and not plan.blocks:
        for name in SIDES:
            await warm_up(sides[name], mixed, plan, [level for _, level, _ in missing], report)
    # What is measured of one side before it is the other's turn: one place, or all of a block.
    for _, together in groupby(missing, key=lambda place: place[0] if plan.blocks else place):
        journal.begin()
        group = list(together)
        first = group[0]
        flipped = (first[0] + (0 if plan.blocks else cells.index(first[1:]))) % 2
        for name in reversed(SIDES) if flipped else SIDES:
            try:
                if plan.blocks:
                    await sides[name].start(report)
                    await warm_up(sides[name], mixed, plan, [level for _, level, _ in group], report)
                for turn, level, task in group:
                    prompts = chosen(workload.prompts[task], plan.count(level), turn)
                    done = await one_pass(sides[name], prompts, turn, level, task)
                    await check(sides[name], done, journal)
                    journal.add(done)
                    passes += 1
                    share = passes / (2 * len(places))
                    report(Progress(turn, plan.rounds, level, task, share, list(journal.pairs.values())))
            except EyasError as error:
                raise BenchError(
                    f"{error} Pairs of passes that are kept: {len(journal.pairs)}. Give the same command with --resume "
                    f"and --out {journal.path.with_suffix('.json')} to go on."
                ) from error
    return [journal.pairs[place] for place in places]


def mixed_up(workload: Workload) -> list[Prompt]:
    """Prompts of all tasks in turn."""
    longest = max(map(len, workload.prompts.values()))
    return [prompts[n] for n in range(longest) for prompts in workload.prompts.values() if n < len(prompts)]


async def warm_up(side: Side, prompts: Sequence[Prompt], plan: Plan, levels: Sequence[Level], report: Report) -> None:
    """As many requests as a pass has."""
    for level in dict.fromkeys(levels):
        for turn in range(plan.warmup):
            report(f"warming up at {level}, {side.name} speculation")
            done = await one_pass(side, chosen(prompts, plan.count(level), turn), turn, level, "warm-up")
            if done.failed and not done.good:
                raise BenchError(f"All requests {side.name} speculation fail: {done.failed[0].error}.")


async def one_pass(side: Side, prompts: Sequence[Prompt], turn: int, level: Level, task: str) -> Pass:
    before = await side.before()
    loaded = await load.put(side.ask, prompts, level, seed=turn)
    heard = Heard()
    if not any(answer.lost for answer in loaded.answers) or await side.alive():
        heard = await side.after(before, loaded.answers)
    if level.kind == "concurrency" and loaded.running < FULL * level.value:
        note = f"at {level} fewer than {FULL:.0%} of it were running on average: ask more at a time (--num-prompts)"
        heard = replace(heard, notes=(*heard.notes, note))
    return Pass(turn, level, task, side.name, loaded.seconds, loaded.answers, loaded.running, **vars(heard))


async def _gone(side: Side, answers: Sequence[Answer]) -> bool:
    """Where connections broke: whether nobody is there any more."""
    if not any(answer.lost for answer in answers):
        return False
    for _ in range(PATIENCE):
        if await side.alive():
            return False
        await asyncio.sleep(1.0)
    return True


async def check(side: Side, done: Pass, journal: Journal | None = None) -> None:
    """Ends the benchmark where a side is gone or answers nothing at all; what it answered before is kept."""
    gone = await _gone(side, done.answers)
    if gone or not done.good:
        if journal is not None:
            journal.add(done, complete=False)
        what = "is gone" if gone else "answers nothing any more"
        why = done.failed[0].error
        raise BenchError(f"The side {side.name} speculation {what} ({why}) in round {done.turn + 1} at {done.level}.")
