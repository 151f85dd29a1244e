"""What the frozen target has to say about a batch: its states, and what it would write where the drafter will guess."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from eyas.speculation.top import largest
from eyas.target.adapter import HFTarget, find_head
from eyas.target.contract import Block
from eyas.training.batches import Batch

CHUNK = {"cpu": 1 << 22, "cuda": 1 << 28}  # probabilities over the whole vocabulary at once


@dataclass(frozen=True)
class Labels:
    """The target's distributions at M places, over the D tokens of the draft vocabulary."""

    probs: torch.Tensor  # [M, D], as they are, not renormalised: what a row lacks to 1 is out of the drafter's reach
    mass: torch.Tensor  # float32 [M], the sum of each row
    best: torch.Tensor  # int64 [M], the column of the target's likeliest token; -1: not in the draft vocabulary


@dataclass(frozen=True)
class Features:
    batch: Batch
    states: torch.Tensor  # [B, T, len(layer_ids) * H]
    labels: Labels
    label_of: torch.Tensor  # int64 [B, T], the row of ``labels`` about what follows a token; -1 where no draft asks


class FrozenTarget:
    """Runs a target over batches. ``draft_ids`` int64 [D] are the target's ids of the draft vocabulary.

    The probabilities come from the model's own head path, soft caps and scales included, at a ``temperature``, in
    ``dtype``.
    """

    def __init__(
        self,
        target: HFTarget,
        layer_ids: Sequence[int],
        draft_ids: torch.Tensor,
        *,
        dtype: torch.dtype = torch.float32,
        temperature: float = 1.0,
    ):
        self.target, self.layer_ids = target, tuple(layer_ids)
        self.dtype, self.temperature = dtype, temperature
        self._ids = draft_ids.to(target.device)
        self._head = find_head(target.model)
        self._cache = target.new_cache(1)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Features:
        asked = torch.zeros_like(batch.ahead, dtype=torch.bool)
        asked[:, 1:] = batch.ahead[:, :-1] >= 2  # the token before is the root of a draft, the one after its first
        places = asked.flatten().nonzero()[:, 0]
        label_of = torch.full_like(batch.tokens, -1)
        label_of[asked] = torch.arange(len(places), device=label_of.device)
        states, logits = self._forward(batch, places)
        return Features(batch, states, self._labels(logits), label_of)

    def _forward(self, batch: Batch, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States [B, T, ...] and logits [M, V] at the flat ``places``: the head does no work for others."""
        lines, count = batch.tokens.shape
        if self._cache.rows < lines * count:
            self._cache = self.target.new_cache(lines * count)
        self._cache.layout(lines, count)
        starts = torch.zeros(lines, dtype=torch.long, device=batch.tokens.device)
        block = Block(batch.tokens, 0, starts, count, depths=batch.places, ancestors=batch.seen())
        self.target.set_eagle3_layers_to_capture(self.layer_ids)  # acceptance is measured with the same target
        with _only(self._head, places):
            out = self.target.forward(block, self._cache)
        assert out.states is not None
        logits = out.logits.flatten(0, 1)
        return out.states, logits if len(logits) == len(places) else logits[places]

    def _labels(self, logits: torch.Tensor) -> Labels:
        most = CHUNK["cpu" if logits.device.type == "cpu" else "cuda"]
        parts = [self._chunk(part) for part in logits.split(max(1, most // logits.shape[1]))]
        return Labels(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _chunk(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = logits if self.temperature == 1 else logits.float() / self.temperature
        every = logits.to(self.dtype).softmax(-1)  # in one pass, and several times faster than to float32
        probs = every.index_select(-1, self._ids)
        value, column = largest(probs)
        best = torch.where(value == every.amax(-1), column, -1)
        return probs, probs.sum(-1, dtype=torch.float32), best


@contextmanager
def _only(head: Any, places: torch.Tensor) -> Iterator[None]:
    """The head sees [1, M, H]: these of the B * T states it is given."""
    hook = head.register_forward_pre_hook(lambda _, args: (args[0].flatten(0, 1)[places][None], *args[1:]))
    try:
        yield
    finally:
        hook.remove()
