"""Tensors for the engine: reads prompts, verifies drafts, keeps target and drafter in step. It knows no queues."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import torch

from eyas.core import Acceptance, Draft, RequestError
from eyas.drafter.contract import Drafter, TrueStates
from eyas.engine.sequence import Sequence
from eyas.speculation.tree import ancestor_mask
from eyas.target.contract import Block, Eagle3Target, TargetOutput

PREFILL_CHUNK = 512  # bounds a chunk's mask and logits; an image is never split


@dataclass(frozen=True)
class Pending:
    """The last chunk of a prompt: the drafter can have its states once the first token of the answer is known."""

    start: int
    tokens: torch.Tensor  # int64 [T]
    output: TargetOutput


class Runner:
    def __init__(self, target: Eagle3Target, drafter: Drafter | None, slots: int, rows: int):
        self.target, self.drafter = target, drafter
        self.cache = target.new_cache(slots, rows)
        if drafter:
            drafter.start(target, slots, rows)

    def prefill(self, sequence: Sequence) -> Pending:
        """Reads the prompt, and what was answered before, into the slot; the last logits are in ``output``."""
        prompt, images = sequence.request.prompt_ids, sequence.request.images
        ids = self._tensor([*prompt, *sequence.output_ids])
        start, size = 0, len(prompt) if images else PREFILL_CHUNK
        pending: Pending | None = None
        while start < len(ids):
            chunk = ids[start : start + size]
            if pending:
                self._feed(sequence, pending, chunk[:1])
            block = Block(chunk[None], (sequence.slot,), (start,), (sequence.rope_delta,))
            pending = Pending(start, chunk, self._read(sequence, block, images))
            sequence.rope_delta += pending.output.rope_delta
            start = sequence.length = start + len(chunk)
            images, size = None, PREFILL_CHUNK  # what was answered before holds no image
        assert pending is not None, "an empty prompt was let in"
        return pending

    def after_prefill(self, sequence: Sequence, pending: Pending) -> None:
        """Completes the drafter's view of the prompt once the first token of the answer is known."""
        self._feed(sequence, pending, self._tensor([sequence.last_token]))

    def verify(self, sequences: Many[Sequence], drafts: Many[Draft]) -> TargetOutput:
        """One target pass over all drafts, padded to the largest: row i of the result belongs to sequence i."""
        sizes = [len(draft.parents) for draft in drafts]
        count = max(sizes)
        slots = tuple(s.slot for s in sequences)
        starts = tuple(s.length for s in sequences)
        deltas = tuple(s.rope_delta for s in sequences)
        if len(drafts) == 1:
            tokens = drafts[0].tokens[None]
        else:
            # padded with the root: masked all the same, but another token's keys and values might be NaN
            rows = [torch.cat([d.tokens, d.tokens[:1].expand(count - len(d.tokens))]) for d in drafts]
            tokens = torch.stack(rows)
        if all(max(draft.depths) == count - 1 for draft in drafts):  # chains of one length: causal
            return self._forward(sequences, Block(tokens, slots, starts, deltas))
        depths = torch.zeros(len(drafts), count, dtype=torch.long)  # padding stays at a place that surely exists
        ancestors = torch.eye(count, dtype=torch.bool).repeat(len(drafts), 1, 1)
        for row, (draft, size) in enumerate(zip(drafts, sizes, strict=True)):
            depths[row, :size] = torch.tensor(draft.depths)
            ancestors[row, :size, :size] = ancestor_mask(draft.parents)
        device = tokens.device
        block = Block(tokens, slots, starts, deltas, depths.to(device), ancestors.to(device))
        return self._forward(sequences, block)

    def keep(self, sequence: Sequence, acceptance: Acceptance, states: torch.Tensor | None) -> None:
        """Keeps the accepted path in the target's cache and redoes its tokens in the drafter with their true states.

        ``states`` [N, len(layer_ids) * H] belong to the draft's nodes; None where there is no drafter.
        """
        start, path = sequence.length, acceptance.path
        self.cache.keep(sequence.slot, start, path)
        sequence.length += len(path)
        if self.drafter and self.drafts_for(sequence):
            assert states is not None
            straight = path[-1] == len(path) - 1
            kept = states[: len(path)] if straight else states[self._tensor(path)]
            self.drafter.extend(sequence, TrueStates(start, kept, self._tensor(acceptance.tokens)))

    def drafts_for(self, sequence: Sequence) -> bool:
        """Whether the drafter follows this sequence. One that was decoded plainly cannot be drafted for half-way."""
        return self.drafter is not None and sequence.request.speculate and sequence.finish_reason is None

    def drop_draft(self, sequence: Sequence) -> None:
        """Wipes what a draft left in the target's cache, which may be NaN."""
        self.cache.clear(sequence.slot, sequence.length)

    def clear(self, slot: int) -> None:
        """Wipes a slot that may hold NaN: a masked row still takes part as 0 * its value."""
        self.cache.clear(slot)
        if self.drafter:
            self.drafter.clear(slot)

    def _forward(self, sequences: Many[Sequence], block: Block, **how: Any) -> TargetOutput:
        """States are captured for sequences that the drafter follows: plain decoding does not pay for them."""
        follows = self.drafter is not None and any(self.drafts_for(s) for s in sequences)
        self.target.set_eagle3_layers_to_capture(self.drafter.layer_ids if self.drafter and follows else None)
        return self.target.forward(block, self.cache, **how)

    def _read(self, sequence: Sequence, block: Block, images: Mapping[str, Any] | None) -> TargetOutput:
        try:
            return self._forward([sequence], block, last_only=True, images=images)
        except (ValueError, RuntimeError, IndexError, TypeError) as error:
            if not images or isinstance(error, torch.OutOfMemoryError):
                raise
            what = f"{type(error).__name__}: {error}"
            raise RequestError(f"The target cannot read this prompt with these images ({what}).") from error

    def _feed(self, sequence: Sequence, pending: Pending, following: torch.Tensor) -> None:
        if not self.drafter or not self.drafts_for(sequence):
            return
        output = pending.output
        assert output.states is not None
        tokens = torch.cat([pending.tokens[1:], following])
        if output.embeds is None:
            true = TrueStates(pending.start, output.states[0], tokens)
        else:  # the drafter sees images as the target does; the token after the prompt is never one
            image_mask = self.target.image_positions(pending.tokens[None], output.embeds)[0].roll(-1)
            image_mask[-1] = False
            true = TrueStates(pending.start, output.states[0], tokens, image_mask, output.embeds[0].roll(-1, 0))
        self.drafter.extend(sequence, true)

    def _tensor(self, ids: Many[int]) -> torch.Tensor:
        return torch.tensor(ids, dtype=torch.long, device=self.target.device)
