"""How well a drafter guesses, measured by decoding: real drafts, verified by the real target, in the real engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from eyas.core import DraftShape, EyasError, Request, RequestError, SamplingParams, UsageError
from eyas.drafter.contract import Drafter
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.drafter.model import Eagle3Model
from eyas.engine.engine import Engine, rows_for
from eyas.engine.memory import kv_rows
from eyas.engine.policy import BatchView, Decision, Fixed
from eyas.engine.stats import AcceptanceStats
from eyas.target.adapter import HFTarget
from eyas.target.tuning import pack_linears

AT_ONCE = {"cpu": 8, "cuda": 64}  # prompts answered together: how many changes the time it takes, not the result
RESAMPLES = 2000

Report = Callable[[float], None]


@dataclass(frozen=True)
class Answered:
    """One prompt's answer, and what became of its drafts. The answer is the target's alone, whatever was drafted."""

    prompt_ids: Sequence[int]
    output_ids: list[int]
    sampling: SamplingParams  # with the seed that this prompt had
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)


class Whole(Fixed):
    """Always the whole draft, also where the answer will end inside it.

    ``Fixed`` drafts less where no sequence of the batch has room for more: then what is counted for the last step of an
    answer would depend on who else is being answered.
    """

    def decide(self, view: BatchView) -> Decision:
        return Decision(self.shape if view.drafted else None, "measuring")


def measure_acceptance(
    target: HFTarget,
    drafter: Eagle3Model,
    prompts: Sequence[Sequence[int]],
    *,
    steps: int = 5,
    max_tokens: int = 64,
    eos_ids: Sequence[int] = (),
) -> AcceptanceStats:
    """Acceptance of a chain of ``steps`` over the answers to ``prompts`` (token ids), all together.

    Made for a drafter in training: it is copied to what will be loaded from its files (the target's dtype), and neither
    its weights nor what it borrows are touched. The target captures the drafter's layers afterwards. Greedy.
    Errors as for ``answer_all``.
    """
    sampling = SamplingParams(seed=0, max_tokens=max_tokens)
    shape = DraftShape(steps, 1, steps + 1)
    copied = Eagle3Drafter(as_loaded(drafter, target))
    return total(a.stats for a in answer_all(target, copied, prompts, shape=shape, sampling=sampling, eos_ids=eos_ids))


def as_loaded(drafter: Eagle3Model, target: HFTarget) -> Eagle3Model:
    """A copy of ``drafter`` as ``load_drafter`` would give it for ``target``: its dtype and device, ready to decode."""
    with torch.device("meta"):
        model = Eagle3Model(drafter.config)
    state = {
        name: value.detach().to(target.device, target.dtype if value.is_floating_point() else value.dtype, copy=True)
        for name, value in drafter.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    pack_linears(model)
    return model.eval()


def answer_all(
    target: HFTarget,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    shape: DraftShape,
    sampling: SamplingParams,
    eos_ids: Sequence[int] = (),
    report: Report = lambda share: None,
) -> list[Answered]:
    """Answers all prompts with drafts of one shape; ``report`` hears how much of it is done.

    Every token but an answer's first comes of a verify step. The n-th prompt's seed is that of ``sampling`` + n.
    Raises UsageError where there are no prompts, RequestError for one that is empty, too long or of another vocabulary,
    NonFiniteLogitsError where the target breaks, and EyasError where the drafter does.
    """
    if not prompts:
        raise UsageError("There are no prompts to measure acceptance on: give at least one.")
    engine = _engine(target, drafter, prompts, shape, sampling, eos_ids)
    answers = []
    for number, prompt in enumerate(prompts):
        mine = replace(sampling, seed=sampling.seed + number)
        try:
            engine.add(Request(str(number), prompt, mine))
        except RequestError as error:
            raise RequestError(f"Prompt {number + 1} of {len(prompts)} cannot be answered: {error}") from error
        answers.append(Answered(prompt, [], mine))
    finished = 0
    while not engine.idle:
        for output in engine.step():
            answer = answers[int(output.request_id)]
            if output.error is not None:
                raise output.error
            answer.output_ids.extend(token.token_id for token in output.emitted)
            if output.stats is not None:
                answer.stats.add(output.stats)
                finished += 1
                report(finished / len(answers))
    for number, answer in enumerate(answers):
        if answer.stats.emitted != len(answer.output_ids) - 1:
            raise EyasError(
                f"The drafter failed while prompt {number + 1} of {len(answers)} was answered, and decoding went on "
                "without it: there is no acceptance to report (the log says why)."
            )
    return answers


def _engine(
    target: HFTarget,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    shape: DraftShape,
    sampling: SamplingParams,
    eos_ids: Sequence[int],
) -> Engine:
    """With room for as many answers at once as fit whole: one that had to be read again would be counted otherwise."""
    context = max(map(len, prompts)) + sampling.max_tokens
    context = min(context, target.context_length or context)
    most = min(AT_ONCE.get(target.device.type, AT_ONCE["cuda"]), len(prompts))
    rows = kv_rows(target, drafter, context, shape, most)
    return Engine(
        target,
        drafter,
        shape=shape,
        context_length=context,
        eos_ids=eos_ids,
        max_running_requests=min(most, rows // rows_for(context, shape)),
        kv_rows=rows,
        policy=Whole(shape),
        prefix_caching=False,
    )


def total(parts: Iterable[AcceptanceStats]) -> AcceptanceStats:
    """The counts of all ``parts`` together."""
    stats = AcceptanceStats()
    for part in parts:
        stats.add(part)
    return stats


def interval(parts: Sequence[AcceptanceStats]) -> tuple[float, float]:
    """Of 95% for the acceptance length, other prompts of this kind considered: resampling whole prompts (bootstrap)."""
    counts = np.array([(part.emitted, part.steps) for part in parts], dtype=np.float64)
    if not len(counts) or not counts[:, 1].sum():
        return 1.0, 1.0
    drawn = np.random.default_rng(0).integers(len(counts), size=(RESAMPLES, len(counts)))
    emitted, steps = counts[drawn].sum(1).T
    lengths = np.divide(emitted, steps, out=np.ones_like(emitted), where=steps > 0)
    low, high = np.quantile(lengths, (0.025, 0.975))
    return float(low), float(high)
