"""The drafter's head and its loss in one: the scores of a vocabulary are made, judged and forgotten piece by piece.

Their gradient is known in closed form, so it is computed with them, and nothing as wide as the vocabulary is kept for
the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn import functional as F

from eyas.training.features import Labels
from eyas.training.unroll import Guesses

LossName = Literal["cross-entropy", "acceptance"]
CHUNK = {"cpu": 1 << 22, "cuda": 1 << 26}  # scores at once: what a CPU's cache holds, what fills a GPU


@dataclass(frozen=True)
class StepSums:
    """Sums over the places of each unroll step, float32 [S] each, none of them with a gradient."""

    places: torch.Tensor
    loss: torch.Tensor
    hits: torch.Tensor  # the drafter's likeliest token is the target's
    missing: torch.Tensor  # probability of the target outside the draft vocabulary

    def __add__(self, other: StepSums) -> StepSums:
        most = max(len(self.places), len(other.places))
        mine, theirs = ([F.pad(x, (0, most - len(x))) for x in vars(sums).values()] for sums in (self, other))
        return StepSums(*(a + b for a, b in zip(mine, theirs, strict=True)))


def cross_entropy(scores: torch.Tensor, probs: torch.Tensor, mass: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-sum p log q over the draft vocabulary, p not renormalised: a place counts as much as the drafter can have of it.

    scores, probs: [R, D], the largest score of a row being 0; mass: [R]. Returns the loss float32 [R] and its gradient
    [R, D] with respect to the scores, mass * q - p.
    """
    q = scores.softmax(-1)
    loss = -mass * q.amax(-1).float().log() - (probs * scores).sum(-1).float()  # log q = score - log sum exp scores
    return loss, q.mul_(mass.to(q.dtype)[:, None]).sub_(probs)


def acceptance(scores: torch.Tensor, probs: torch.Tensor, mass: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-log of the chance that speculative sampling accepts, a = sum min(p, q) (LK losses, arXiv 2602.23881).

    Arguments and results as for ``cross_entropy``. With r = q where q < p, else 0, the gradient of -log a with respect
    to the scores is (q * sum r - r) / a. Places are weighted with ``mass``.
    """
    q = scores.softmax(-1)
    rising = torch.where(q < probs, q, 0)
    chance = torch.minimum(q, probs).sum(-1, dtype=torch.float32).clamp(min=1e-6)
    share = rising.sum(-1, dtype=torch.float32)
    weight = mass / chance
    gradient = q.mul_((share * weight).to(q.dtype)[:, None]).sub_(rising.mul_(weight.to(q.dtype)[:, None]))
    return -mass * chance.log(), gradient


LOSSES: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "cross-entropy": cross_entropy,
    "acceptance": acceptance,
}


def loss_of(
    guesses: Sequence[Guesses], head: torch.Tensor, labels: Labels, *, kind: LossName, decay: float
) -> tuple[torch.Tensor, StepSums]:
    """The mean loss of each step, averaged with weights ``decay`` ** step; and what it is made of.

    head: [D, H]. Scores are computed in the dtype of ``labels.probs``.
    """
    counts = [len(step.labels) for step in guesses]
    weights = torch.tensor([decay**step for step in range(len(counts))])
    each = (weights / weights.sum() / torch.tensor(counts)).to(head.device)
    scale = each.repeat_interleave(torch.tensor(counts, device=head.device))
    rows = torch.cat([step.labels for step in guesses])
    total, losses, hits = HeadLoss.apply(torch.cat([step.normed for step in guesses]), head, labels, rows, scale, kind)
    columns = (torch.ones_like(losses), losses, hits.float(), 1 - labels.mass[rows])
    return total, StepSums(*(torch.stack([part.sum() for part in column.split(counts)]) for column in columns))


class HeadLoss(torch.autograd.Function):
    """(sum of scale * loss, loss float32 [R], hits bool [R]); only the first has a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        normed: torch.Tensor,  # [R, H]
        head: torch.Tensor,  # [D, H]
        labels: Labels,
        rows: torch.Tensor,  # int64 [R], of the labels
        scale: torch.Tensor,  # float32 [R]
        kind: LossName,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype, wanted = labels.probs.dtype, ctx.needs_input_grad[:2]
        inputs, weight = normed.to(dtype), head.to(dtype)
        by_input = torch.empty_like(normed) if wanted[0] else None
        by_head = torch.zeros_like(head, dtype=torch.float32) if wanted[1] else None
        losses, hits = [], []
        most = CHUNK["cpu" if head.device.type == "cpu" else "cuda"]
        count = max(1, most // len(head))
        for start in range(0, len(rows), count):
            here = slice(start, start + count)
            row = rows[here]
            scores, best = F.linear(inputs[here], weight), labels.best[row]
            scores.sub_(scores.amax(-1, keepdim=True))
            own = scores.gather(1, best.clamp(min=0)[:, None])[:, 0]
            hits.append((own == 0) & (best >= 0))
            loss, gradient = LOSSES[kind](scores, labels.probs[row], labels.mass[row])
            losses.append(loss)
            gradient.mul_(scale[here].to(dtype)[:, None])
            if by_input is not None:
                by_input[here] = gradient @ weight
            if by_head is not None:
                by_head += gradient.mT @ inputs[here]
        ctx.save_for_backward(by_input, by_head)
        ctx.head_dtype = head.dtype
        every, hit = torch.cat(losses), torch.cat(hits)
        ctx.mark_non_differentiable(every, hit)
        return (every * scale).sum(), every, hit

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        by_input, by_head = ctx.saved_tensors
        scaled = (None if by is None else by * upstream[0] for by in (by_input, by_head))
        by_input, by_head = scaled
        return by_input, None if by_head is None else by_head.to(ctx.head_dtype), None, None, None, None
