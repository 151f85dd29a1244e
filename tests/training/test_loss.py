"""The head and its loss, whose gradient is written by hand, against autograd on a plain loop over places."""

from __future__ import annotations

import math

import pytest
import torch

from eyas.training import loss
from eyas.training.features import Labels
from eyas.training.loss import LOSSES, StepSums, loss_of
from eyas.training.unroll import Guesses

HIDDEN, DRAFT, PLACES = 12, 40, 30


def made(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, Labels, list[Guesses]]:
    """A head, labels with missing mass (one row misses nearly all), and guesses of three steps."""
    generator = torch.Generator().manual_seed(seed)
    probs = (3 * torch.randn(PLACES, DRAFT + 10, generator=generator)).softmax(-1)
    probs[0, :DRAFT] *= 1e-6
    probs = probs[:, :DRAFT]
    best = torch.where(probs.amax(-1) > 0.2, probs.argmax(-1), -1)
    labels = Labels(probs.to(dtype), probs.sum(-1), best)
    head = torch.randn(DRAFT, HIDDEN, generator=generator).to(dtype).float()
    steps = [
        Guesses(torch.randn(n, HIDDEN, generator=generator), torch.randint(PLACES, (n,), generator=generator))
        for n in (30, 20, 7)
    ]
    return head, labels, steps


def naive(kind: str, head: torch.Tensor, labels: Labels, steps: list[Guesses], decay: float) -> torch.Tensor:
    total, weights = torch.zeros(()), 0.0
    for number, step in enumerate(steps):
        mean = torch.zeros(())
        for normed, row in zip(step.normed, step.labels, strict=True):
            q, p = (head @ normed).softmax(-1), labels.probs[row]
            if kind == "cross-entropy":
                one = -(p * q.log()).sum()
            else:
                one = -p.sum() * torch.minimum(p, q).sum().clamp(min=1e-6).log()
            mean = mean + one / len(step.labels)
        total = total + decay**number * mean
        weights += decay**number
    return total / weights


@pytest.mark.parametrize("chunk", [1, 7 * DRAFT, 1 << 24])
@pytest.mark.parametrize("kind", LOSSES)
def test_value_and_gradient(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK", {"cpu": chunk})
    head, labels, steps = made()
    inputs = [head, *(step.normed for step in steps)]
    for tensor in inputs:
        tensor.requires_grad_()
    total, _ = loss_of(steps, head, labels, kind=kind, decay=0.8)
    expected = naive(kind, head, labels, steps, 0.8)
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)
    ours = torch.autograd.grad(3 * total, inputs)
    theirs = torch.autograd.grad(3 * expected, inputs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_frozen_head_gets_no_gradient() -> None:
    head, labels, steps = made()
    steps[0].normed.requires_grad_()
    total, _ = loss_of(steps, head, labels, kind="cross-entropy", decay=1.0)
    total.backward()
    assert head.grad is None and steps[0].normed.grad is not None


@pytest.mark.parametrize("kind", LOSSES)
def test_half_precision_is_near(kind: str) -> None:
    grads = []
    for dtype in (torch.float32, torch.bfloat16):
        head, labels, steps = made(dtype=dtype)
        head.requires_grad_()
        total, _ = loss_of(steps, head, labels, kind=kind, decay=0.8)
        total.backward()
        assert head.grad is not None and head.grad.dtype == torch.float32
        grads.append((total.item(), head.grad))
    assert math.isclose(grads[0][0], grads[1][0], rel_tol=0.02)
    assert torch.cosine_similarity(grads[0][1].flatten(), grads[1][1].flatten(), dim=0) > 0.999


def test_sums_by_step() -> None:
    head, labels, steps = made()
    _, sums = loss_of(steps, head, labels, kind="cross-entropy", decay=0.8)
    assert sums.places.tolist() == [30, 20, 7]
    for number, step in enumerate(steps):
        scores = step.normed @ head.T
        assert sums.hits[number] == (scores.argmax(-1) == labels.best[step.labels]).sum()
        p = labels.probs[step.labels]
        torch.testing.assert_close(sums.missing[number], (1 - p.sum(-1)).sum())
        torch.testing.assert_close(sums.loss[number], -(p * scores.log_softmax(-1)).sum(), rtol=1e-5, atol=1e-5)


def test_what_is_out_of_reach_asks_for_nothing() -> None:
    """A place whose mass lies outside the draft vocabulary pulls nowhere; renormalised, it would pull as any other."""
    head, labels, _ = made()
    normed = torch.ones(1, HIDDEN, requires_grad=True)
    total, sums = loss_of([Guesses(normed, torch.tensor([0]))], head, labels, kind="cross-entropy", decay=1.0)
    total.backward()
    assert normed.grad is not None and normed.grad.abs().max() < 1e-4
    assert sums.missing[0] > 0.999


def test_added_up() -> None:
    one = StepSums(*(torch.tensor([float(n), 2.0]) for n in range(4)))
    both = one + StepSums(*(torch.tensor([1.0]) for _ in range(4)))
    assert both.places.tolist() == [1.0, 2.0] and both.hits.tolist() == [3.0, 2.0]
