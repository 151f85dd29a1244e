"""One pass over answers that the target gave: where its next tokens rank among the drafter's, after every token.

The drafter is unrolled along the answer itself, as in training, from all its places at once: what a draft at that place
would have been as long as it was right. So a single pass holds the chains of all lengths, and the true branch of all
trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eyas.core import UsageError
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.drafter.model import Eagle3Model
from eyas.speculation.sampling import needs_history, perturbed
from eyas.target.adapter import HFTarget
from eyas.training.acceptance import Answered
from eyas.training.batches import Batch, pack
from eyas.training.dataset import Row
from eyas.training.features import FrozenTarget
from eyas.training.unroll import unroll

UNRANKED, BEHIND = -1, -2
CHUNK = 256  # places whose scores are looked at at once

Report = Callable[[float], None]


@dataclass(frozen=True)
class Recording:
    """What drafts from each of R places of one answer would hold; place r has emitted r + 1 tokens.

    ``ranks[r, d]`` is the rank that output r + 1 + d has at draft depth d, given the true tokens before it: 0 is the
    drafter's first choice, UNRANKED stands for all beyond the first K and for tokens outside the draft vocabulary, and
    BEHIND for what would lie behind the answer's end.
    """

    ranks: np.ndarray  # int64 [R, D]
    logps: np.ndarray  # float32 [R, D, K], log-probabilities of the first K; with noise where sampled, as drafts use it


def record(
    target: HFTarget,
    drafter: Eagle3Drafter,
    answers: Sequence[Answered],
    *,
    depth: int = 8,
    width: int = 8,
    report: Report = lambda share: None,
) -> list[Recording]:
    """Records ``answers`` for drafts of up to ``depth`` steps and a top-k of up to ``width``.

    Both models must be as they were when the answers were given. Raises UsageError for penalties, whose scores depend
    on the tokens of each branch.
    """
    if any(needs_history(answer.sampling) for answer in answers):
        raise UsageError("Penalties cannot be simulated: measure them with real runs, without a recording.")
    model = drafter.model
    model.bind(*target.get_embed_and_head())
    frozen = FrozenTarget(target, model.aux_layer_ids, model.draft_to_target)
    width = min(width, model.config.draft_vocab_size)
    recordings = []
    for number, answer in enumerate(answers):
        recordings.append(_record(frozen, model, answer, depth, width))
        report((number + 1) / len(answers))
    return recordings


@torch.inference_mode()
def _record(frozen: FrozenTarget, model: Eagle3Model, answer: Answered, depth: int, width: int) -> Recording:
    places = len(answer.output_ids) - 1  # behind the last token there is nothing to compare a draft with
    ranks = np.full((places, depth), BEHIND)
    logps = np.zeros((places, depth, width), dtype=np.float32)
    if places == 0:
        return Recording(ranks, logps)
    outputs = torch.tensor(answer.output_ids, device=model.device)
    for step, guesses in enumerate(unroll(model, frozen(batch_of(answer).to(model.device)), depth)):
        known = places - step  # places at which the answer goes on so far
        for start in range(0, known, CHUNK):
            rows = slice(start, min(start + CHUNK, known))
            scores = perturbed(
                model.logits(guesses.normed[rows]),
                answer.sampling,
                torch.arange(rows.start, rows.stop, device=model.device) + 1 + step,
                token_ids=model.draft_to_target,
            )
            best = scores.topk(width)
            logps[rows, step] = (best.values - scores.logsumexp(-1, keepdim=True)).cpu()
            found = model.draft_to_target[best.indices] == outputs[rows.start + 1 + step : rows.stop + 1 + step, None]
            ranks[rows, step] = torch.where(found.any(-1), found.int().argmax(-1), UNRANKED).cpu()
    return Recording(ranks, logps)


def batch_of(answer: Answered) -> Batch:
    ids = np.array([*answer.prompt_ids, *answer.output_ids], dtype=np.int32)
    return pack([Row(ids, np.arange(len(ids)) >= len(answer.prompt_ids))], [0])
