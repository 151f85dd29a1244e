"""The whole of it: two sides, their rounds, and what they come to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eyas.bench import agreement, pairing, results
from eyas.bench.facts import Facts
from eyas.bench.journal import Journal, check
from eyas.bench.pairing import Plan, Report
from eyas.bench.passes import SIDES, BenchError, Name, Pair
from eyas.bench.sides import Side
from eyas.bench.verdict import differences_of, refusals
from eyas.bench.workload import Workload
from eyas.files import write_whole

FORMAT = 1
BLOCKS = (
    "one side ran at a time, in blocks: each round is a launch of its own of both, so intervals hold what differs from "
    "launch to launch, and drift within a round"
)


@dataclass(frozen=True)
class Benchmark:
    """``even`` is the speedup from which on it pays. ``out`` is the file of the results; the journal is beside it.

    ``about`` is the provenance. ``training_seconds``: what the drafter's training took, where that is known.
    """

    sides: Mapping[Name, Side]
    workload: Workload
    plan: Plan
    out: Path
    resume: bool = False
    even: float = 1.0
    about: Mapping[str, Any] = field(default_factory=dict)
    training_seconds: float | None = None

    @property
    def journal(self) -> Path:
        return self.out.with_suffix(".jsonl")

    async def run(self, report: Report = lambda news: None) -> dict[str, Any]:
        """The results, which are in ``out`` as well. Raises BenchError where there is nothing to judge."""
        check(self.journal, self.resume)
        async with AsyncExitStack() as sides:
            for name in SIDES:  # the last one that started ends first
                sides.push_async_callback(self.sides[name].close)
            report("asking both sides what they are")
            facts = {name: await self.sides[name].start(report) for name in SIDES}
            if found := refusals(facts["without"], facts["with"], self.plan.levels):
                raise BenchError("This would show nothing about speculation. " + " ".join(found))
            report("looking for prompts that are too long")
            last_first = [self.sides[name] for name in reversed(SIDES)]  # which is there in any case
            workload = await pairing.fitting(last_first, self.workload, self.plan)
            journal = Journal(self.journal, self._settings(facts), resume=self.resume)
            pairs = await pairing.measure(self.sides, workload, self.plan, journal, report)
            report("comparing the answers")
            agreed = await self._agreement(pairs, workload)
        made = replace(self, workload=workload)._results(facts, pairs, agreed, journal.interrupted)
        write(self.out, json.dumps(made, indent=1) + "\n")
        return made

    async def _agreement(self, pairs: Sequence[Pair], workload: Workload) -> agreement.Agreement:
        found = agreement.agreement(pairs)
        if found.same == found.answers:
            return found
        prompts = {prompt.key: prompt for prompts in workload.prompts.values() for prompt in prompts}
        return replace(found, explained=await agreement.explain(self.sides["without"], pairs, prompts))

    def _settings(self, facts: Mapping[Name, Facts]) -> dict[str, Any]:
        """What a run that is resumed must have in common with its beginning."""
        sides = {f"{fact} {name} speculation": value for name in SIDES for fact, value in facts[name].lasting().items()}
        return {
            "prompts": f"{self.workload.source}: {', '.join(self.workload.prompts)}",
            "prompts_digest": self.workload.digest,
            **self.plan.lasting(),
            **sides,
        }

    def _results(
        self, facts: Mapping[Name, Facts], pairs: Sequence[Pair], agreed: agreement.Agreement, interrupted: int
    ) -> dict[str, Any]:
        plan, greedy = self.plan, not self.plan.sampling.temperature
        rows, verdict = results.assemble(pairs, plan.levels, self.even)
        judged = {**vars(verdict), "exit_code": verdict.exit_code}
        if refused := results.disagreement(agreed) if greedy else []:
            judged |= {"outcome": "not judged", "sentence": " ".join(refused), "exit_code": 1, "break_even": None}
        return {
            "kind": "eyas bench",
            "format": FORMAT,
            "verdict": judged | {"even": self.even},
            "rows": rows,
            "agreement": agreed.as_record(greedy),
            "repaid": results.repaid(self.training_seconds, rows) if self.training_seconds else None,
            "training_seconds": self.training_seconds,
            "samples": results.samples(pairs),
            "notes": [
                *([BLOCKS] if plan.blocks else []),
                *self.workload.notes,
                *differences_of(facts),
                *results.notes_of(pairs),
            ],
            "sides": {name: facts[name].as_record() for name in SIDES},
            "settings": {**plan.as_record(), "prompts": self.workload.source, "tasks": list(self.workload.prompts)},
            "interrupted_answers": interrupted,
            "rounds": results.round_records(pairs),
            "provenance": dict(self.about),
        }


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror}.") from error


def read(path: Path) -> dict[str, Any]:
    """Results as ``run`` wrote them. Raises BenchError for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise BenchError(f"{path} is not JSON ({error}): expected the results of eyas bench.") from error
    if not isinstance(content, dict) or content.get("kind") != "eyas bench" or content.get("format") != FORMAT:
        raise BenchError(f"{path} does not hold results of this version of eyas bench.")
    return content
