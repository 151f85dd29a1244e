"""What ``eyas eval`` does: a pair's acceptance on prompts of several tasks, and what other draft shapes would bring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eyas.core import DraftShape, SamplingParams, UsageError
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.engine.llm import LLM
from eyas.engine.stats import AcceptanceStats
from eyas.progress import Report
from eyas.target.adapter import HFTarget
from eyas.training.acceptance import Answered, answer_all, interval, total
from eyas.training.conversation import Messages, question, up_to_the_last_question
from eyas.training.heldout import HELDOUT
from eyas.training.recording import record
from eyas.training.simulate import Simulated, simulate
from eyas.training.sources import read_conversations

EVERYTHING = "all"  # the name of all tasks together


@dataclass(frozen=True)
class Prompts:
    """Token ids by task, and how many were left out, by reason."""

    by_task: dict[str, list[list[int]]]
    left_out: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """Acceptance on one task, with what it was measured on."""

    task: str
    temperature: float
    shape: DraftShape
    prompts: int
    tokens: int  # of the answers
    stats: AcceptanceStats
    interval: tuple[float, float]  # 95%, of the acceptance length

    @classmethod
    def of(cls, task: str, shape: DraftShape, answers: Sequence[Answered]) -> Measured:
        parts = [answer.stats for answer in answers]
        tokens = sum(len(answer.output_ids) for answer in answers)
        return cls(task, answers[0].sampling.temperature, shape, len(answers), tokens, total(parts), interval(parts))


@dataclass(frozen=True)
class Checked:
    """A simulated shape, and a real run with it on the same prompts."""

    simulated: Simulated
    real: AcceptanceStats

    @property
    def off(self) -> float:
        """How far the simulation is from it, as a share."""
        return self.simulated.acceptance_length / self.real.acceptance_length - 1


@dataclass(frozen=True)
class Evaluator:
    """A pair, and the prompts by task that it is judged on."""

    target: HFTarget
    drafter: Eagle3Drafter
    prompts: Mapping[str, Sequence[Sequence[int]]]
    eos_ids: tuple[int, ...] = ()
    report: Report = lambda what, share: None

    def measure(self, shape: DraftShape, sampling: SamplingParams) -> tuple[list[Measured], list[Answered]]:
        """Real acceptance of each task and, where there are several, of all of them; and the answers, in that order."""
        answers = self._answers(shape, sampling)
        measured, begin = [], 0
        for task, prompts in self.prompts.items():
            measured.append(Measured.of(task, shape, answers[begin : begin + len(prompts)]))
            begin += len(prompts)
        if len(measured) > 1:
            measured.append(Measured.of(EVERYTHING, shape, answers))
        return measured, answers

    def simulate(self, answers: Sequence[Answered], shapes: Sequence[DraftShape]) -> list[Simulated]:
        """What drafts of these shapes would have come to, from one pass over answers that were measured."""
        depth, width = max(s.num_steps for s in shapes), max(s.eagle_topk for s in shapes)
        what = "recording the drafter along the answers"
        recordings = record(
            self.target, self.drafter, answers, depth=depth, width=width, report=lambda share: self.report(what, share)
        )
        self.report(f"simulating {len(shapes)} draft shapes", None)
        return simulate(recordings, shapes)

    def check(self, simulated: Sequence[Simulated], count: int, sampling: SamplingParams) -> list[Checked]:
        """``count`` of the simulated shapes run for real, from the weakest to the strongest."""
        ordered = sorted(simulated, key=lambda s: s.acceptance_length)
        count = min(count, len(ordered))
        chosen = [ordered[i * (len(ordered) - 1) // max(1, count - 1)] for i in range(count)]
        return [Checked(s, total(a.stats for a in self._answers(s.shape, sampling))) for s in chosen]

    def _answers(self, shape: DraftShape, sampling: SamplingParams) -> list[Answered]:
        every = [prompt for prompts in self.prompts.values() for prompt in prompts]
        how = f"at temperature {sampling.temperature:g}" if sampling.temperature else "greedily"
        what = f"answering {len(every)} prompts {how}, {shape.num_steps} steps, top-k {shape.eagle_topk}"
        return answer_all(
            self.target,
            self.drafter,
            every,
            shape=shape,
            sampling=sampling,
            eos_ids=self.eos_ids,
            report=lambda share: self.report(what, share),
        )


def builtin_prompts(llm: LLM, tasks: Sequence[str] = (), limit: int | None = None) -> Prompts:
    """The project's own, of these ``tasks`` (all by default), at most ``limit`` of each."""
    for task in tasks:
        if task not in HELDOUT:
            raise UsageError(f"There are no built-in prompts for {task!r}: choose from {', '.join(HELDOUT)}.")
    chosen = {task: HELDOUT[task][:limit] for task in tasks or HELDOUT}
    return _encoded(llm, {task: [question(text) for text in texts] for task, texts in chosen.items()})


def prompts_of(llm: LLM, files: Sequence[Path], limit: int | None = None) -> Prompts:
    """Those of JSON lines, each file a task by its name; of a conversation all up to the last question.

    Raises DataError for a file that is none, UsageError where nothing is left.
    """
    by_task: dict[str, list[Messages]] = {}
    left_out: dict[str, int] = {}
    for file in files:
        found = by_task.setdefault(file.stem, [])
        for conversation in read_conversations(file):
            if conversation.problem:
                left_out[conversation.problem] = left_out.get(conversation.problem, 0) + 1
            elif limit is None or len(found) < limit:
                found.append(up_to_the_last_question(conversation.messages))
    return _encoded(llm, by_task, left_out)


def _encoded(llm: LLM, by_task: Mapping[str, Sequence[Messages]], left_out: Mapping[str, int] | None = None) -> Prompts:
    """Prompts that leave room for an answer, if only of one token."""
    found, dropped = {}, dict(left_out or {})
    for task, conversations in by_task.items():
        prompts = [encode(llm, messages) for messages in conversations]
        fitting = [p for p in prompts if len(p) < (llm.target.context_length or len(p) + 1)]
        if too_long := len(prompts) - len(fitting):
            why = f"too long for the context of {llm.target.context_length} tokens"
            dropped[why] = dropped.get(why, 0) + too_long
        if fitting:
            found[task] = fitting
    if not found:
        reasons = "; ".join(f"{why} {count}" for why, count in dropped.items())
        raise UsageError(f"There are no prompts to measure on{f' (left out: {reasons})' if reasons else ''}.")
    return Prompts(found, dropped)


def encode(llm: LLM, messages: Messages) -> list[int]:
    """Through the chat template; a single question as it is for a target that has none."""
    if len(messages) == 1 and not getattr(llm.tokenizer, "chat_template", None):
        return llm.encode(messages[0]["content"])[0]
    return llm.encode(messages)[0]
