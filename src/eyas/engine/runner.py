"""Tensors for the engine: reads prompts, verifies drafts, keeps target and drafter in step. It knows no queues."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from eyas.core import Acceptance, Draft, DraftShape, RequestError
from eyas.drafter.contract import Drafter, Drafting, TrueStates
from eyas.engine.grammar import Grammar, Path, allowed_after, allowed_below, paths_to
from eyas.engine.scheduler import Chunk, Copy, Layout
from eyas.engine.sequence import Sequence
from eyas.speculation.sampling import Rows, rows_of
from eyas.speculation.tree import ancestor_mask, chain
from eyas.target.contract import Block, Eagle3Target, TargetOutput
from eyas.target.packing import FEWEST

logger = logging.getLogger(__name__)

NOBODYS = -2  # a draft token that no target chooses (-1 says that it could choose none)


@dataclass(frozen=True)
class Batch:
    """Sequences in neighbouring slots, one row each; None where nobody decodes: computed along and ignored."""

    slot: int  # of the first row
    rows: Many[Sequence | None]  # [B]
    starts: Many[int]  # [B] rows of each slot that must not be written
    length: int  # rows of a slot that are looked at
    choosing: Rows
    members: Many[tuple[int, Sequence]]  # those that are there, each with its row
    grammars: Many[tuple[int, Grammar]]  # of the constrained ones among them


def catch_up_bucket(places: int, most: int) -> int:
    return min(next((n for n in (1, 2, 4, 6, 8, 12, 16) if n >= places), most), most)


def padded(ids: list[int], width: int) -> list[int]:
    """So many ids: the last one again and again, since another might be one that breaks the target."""
    return ids + ids[-1:] * (width - len(ids))


def followed(batch: Batch) -> list[Sequence | None]:
    """The sequences that the drafter follows, by row."""
    return [s if s is not None and s.follows else None for s in batch.rows]


class Runner:
    def __init__(self, target: Eagle3Target, drafter: Drafter | None, rows: int, catch_up_most: int):
        """``catch_up_most`` states of a sequence are kept for the drafter."""
        self.target, self.drafter, self.catch_up_most = target, drafter, catch_up_most
        self.cache = target.new_cache(rows)
        # [slots, catch_up_most + 1, states]: what the drafter has yet to read; the last place takes what is void
        self._pending: torch.Tensor | None = None
        self._compiled: dict[int, set[int]] = {}  # by sequences: tokens of each in steps that are compiled
        if drafter:
            drafter.start(target, rows)

    # Where things are

    def arrange(self, moves: Many[Layout | Copy]) -> None:
        """Carries out what the scheduler decided, in both caches."""
        for move in moves:
            if isinstance(move, Layout):
                self._lay_out(move)
            else:
                self.cache.copy(move.source, move.dest, move.rows)
                if self.drafter:
                    self.drafter.copy(move.source, move.dest, move.rows)
                if self._pending is not None:
                    self._pending[move.dest] = self._pending[move.source]

    def clear(self, slot: int) -> None:
        """Wipes a slot that may hold NaN: a masked row still takes part as 0 * its value."""
        self.cache.clear(slot)
        if self._pending is not None and slot < len(self._pending):
            self._pending[slot] = 0
        if self.drafter:
            self.drafter.clear(slot)

    def wipe(self) -> None:
        """Wipes all slots."""
        for slot in range(self.cache.slots):
            self.clear(slot)

    def drop_draft(self, sequence: Sequence) -> None:
        """Wipes what a draft left behind a sequence, which may be NaN."""
        self.cache.clear(sequence.slot, start=sequence.length)

    def _lay_out(self, layout: Layout) -> None:
        self.cache.layout(layout.slots, layout.length, layout.used)
        if self.drafter:
            self.drafter.layout(layout.slots, layout.length, layout.used)
            before = self._pending
            width = len(self.drafter.layer_ids) * self.target.hidden_size
            self._pending = torch.zeros(
                layout.slots, self.catch_up_most + 1, width, dtype=self.target.dtype, device=self.target.device
            )
            if before is not None:
                kept = min(len(before), layout.slots)
                self._pending[:kept] = before[:kept]

    # Reading prompts

    def read(self, pieces: Many[Chunk]) -> TargetOutput:
        """One target pass over pieces of prompts in neighbouring slots: logits [n, 1, V] behind each one's last token.

        No sequence knows of it before ``take``: what raises here can be redone.
        """
        first, width = pieces[0].sequence, max(piece.count for piece in pieces)
        starts, deltas = [p.sequence.length for p in pieces], [p.sequence.rope_delta for p in pieces]
        block = Block(
            self._tensor([padded(p.sequence.ids[p.start : p.end], width) for p in pieces]),
            first.slot,
            self._tensor(starts),
            max(starts) + width,
            self._tensor(deltas) if any(deltas) else None,
        )
        ends = self._tensor([piece.count - 1 for piece in pieces])
        images = first.request.images if first.length == 0 else None
        try:
            return self._forward(block, ends=ends, images=images)
        except (ValueError, RuntimeError, IndexError, TypeError) as error:
            if not images or isinstance(error, torch.OutOfMemoryError):
                raise
            what = f"{type(error).__name__}: {error}"
            raise RequestError(f"The target cannot read this prompt with these images ({what}).") from error

    def take(self, pieces: Many[Chunk], output: TargetOutput) -> None:
        """The sequences have these tokens from now on, and the drafter reads their states."""
        if followed := [piece.sequence for piece in pieces if piece.sequence.follows]:
            try:
                self._feed(pieces, output)
            except Exception as error:
                self.give_up(followed, error)
        for piece in pieces:
            piece.sequence.length = piece.end
            piece.sequence.rope_delta += output.rope_delta

    def give_up(self, sequences: Many[Sequence], error: Exception) -> None:
        """The drafter failed: these go on without it."""
        what = f"{type(error).__name__}: {error}"
        logger.warning("The drafter failed (%s): %d requests go on without it", what, len(sequences))
        for sequence in sequences:
            sequence.give_up()

    def _feed(self, pieces: Many[Chunk], output: TargetOutput) -> None:
        """The drafter reads the states whose following token is known; a prompt's last one has to wait for it."""
        assert self.drafter is not None and self._pending is not None and output.states is not None
        known = [min(p.count, len(p.sequence.ids) - 1 - p.start) if p.sequence.follows else 0 for p in pieces]
        if width := max(known):
            tokens = [p.sequence.ids[p.start + 1 : p.start + 1 + n] or [0] for p, n in zip(pieces, known, strict=True)]
            image_mask = embeds = None
            if output.embeds is not None:  # the drafter sees images as the target does
                ids = self._tensor([p.sequence.ids[p.start : p.end] for p in pieces])
                image_mask = self.target.image_positions(ids, output.embeds)[:, 1:]
                embeds = output.embeds[:, 1:]
                if width == pieces[0].count:  # what follows an image prompt is no image
                    image_mask = torch.nn.functional.pad(image_mask, (0, 1))
                    embeds = torch.nn.functional.pad(embeds, (0, 0, 0, 1))
            self.drafter.extend(
                TrueStates(
                    pieces[0].sequence.slot,
                    self._tensor([piece.start for piece in pieces]),
                    self._tensor(known),
                    output.states[:, :width].contiguous(),  # compiled code knows strides by heart
                    self._tensor([padded(ids, width) for ids in tokens]),
                    max(piece.start for piece in pieces) + width,
                    image_mask,
                    embeds,
                )
            )
        for row, (piece, count) in enumerate(zip(pieces, known, strict=True)):
            if piece.sequence.follows and count < piece.count:
                self._pending[piece.sequence.slot, 0] = output.states[row, count]
                piece.sequence.pending = 1

    # Decoding

    def batch(self, slot: int, rows: Many[Sequence | None], starts: Many[int], length: int) -> Batch:
        members = [(row, s) for row, s in enumerate(rows) if s is not None]
        grammars = [(row, s.grammar) for row, s in members if s.grammar is not None]
        return Batch(slot, rows, starts, length, rows_of(rows, self.target.device), members, grammars)

    def catch_up(self, batch: Batch, at_least: int = 1) -> None:
        """The drafter reads the states that wait for it, of all sequences that it follows.

        ``at_least`` so many places each: few sizes of a step are worth more than few places.
        """
        assert self.drafter is not None and self._pending is not None
        sequences = followed(batch)
        counts = [s.pending if s else 0 for s in sequences]
        width = catch_up_bucket(max(at_least, *counts), self.catch_up_most)
        tokens = [s.ids[s.length - s.pending + 1 : s.length + 1] if s else [] for s in sequences]
        covered = [s.length - s.pending if s else start for s, start in zip(sequences, batch.starts, strict=True)]
        waiting = self._pending[batch.slot : batch.slot + len(batch.rows), :width]
        self.drafter.extend(
            TrueStates(
                batch.slot,
                self._tensor(covered),
                self._tensor(counts),
                waiting.clone(memory_format=torch.contiguous_format),  # compiled code knows strides by heart
                self._tensor([t + [0] * (width - len(t)) for t in tokens]),
                batch.length,
            )
        )
        for sequence in sequences:
            if sequence:
                sequence.pending = 0

    def propose(self, batch: Batch, shape: DraftShape) -> Draft:
        """Lets the drafter catch up and draft. Sequences that it does not follow get nodes that are never accepted."""
        assert self.drafter is not None
        self.catch_up(batch, shape.num_steps + 1)
        sequences = followed(batch)
        lengths, roots = self._tensor(batch.starts), self._roots(batch)
        allowed = partial(allowed_below, batch.grammars) if batch.grammars else None
        draft = self.drafter.propose(Drafting(sequences, lengths, roots, batch.choosing, batch.length, allowed), shape)
        # idle rows too: a token that breaks the target must not leave NaN in a slot that is free
        if alone := [row for row, s in enumerate(sequences) if s is None]:
            tokens = draft.tokens.clone()
            tokens[alone, 1:] = NOBODYS
            return Draft(tokens, draft.parents, draft.depths)
        return draft

    def roots(self, batch: Batch) -> Draft:
        """No draft: plain decoding."""
        return chain(self._roots(batch)[:, None])

    def verify(self, batch: Batch, draft: Draft) -> TargetOutput:
        """One target pass over all drafts, chains padded to a step that is compiled."""
        deltas = [s.rope_delta if s else 0 for s in batch.rows]
        tokens, count = draft.tokens.clamp(min=0), draft.tokens.shape[1]
        if (width := self._width(*tokens.shape)) > count and draft.parents is None:
            tokens = torch.cat((tokens, tokens[:, -1:].expand(-1, width - count)), dim=1)
        block = Block(
            tokens,
            batch.slot,
            self._tensor(batch.starts),
            batch.length,
            self._tensor(deltas) if any(deltas) else None,
            draft.depths,
            None if draft.parents is None else ancestor_mask(draft),
        )
        output = self._forward(block)
        if tokens.shape[1] == count:
            return output
        return TargetOutput(output.logits[:, :count], output.states[:, :count] if output.states is not None else None)

    def paths(self, batch: Batch, draft: Draft) -> list[list[Path]]:
        """What ``constrain`` asks about. To be read before ``verify``, which a GPU would have to finish first."""
        return paths_to([row for row, _ in batch.grammars], draft) if batch.grammars else []

    def constrain(self, batch: Batch, draft: Draft, paths: Many[Many[Path]]) -> tuple[Draft, torch.Tensor | None]:
        """What may follow each node, as ``choose`` takes it, and the draft without what cannot be: never accepted."""
        if not batch.grammars:
            return draft, None
        bits, wrong = allowed_after(batch.grammars, paths)
        allowed = bits.to(draft.tokens.device, non_blocking=True)
        if not wrong:
            return draft, allowed
        tokens = draft.tokens.clone()
        for row, node in wrong:
            tokens[row, node] = NOBODYS
        return Draft(tokens, draft.parents, draft.depths), allowed

    def keep(self, batch: Batch, draft: Draft, acceptance: Acceptance, states: torch.Tensor | None) -> None:
        """Keeps the accepted paths in the target's cache, and their states for the drafter."""
        if draft.parents is not None:
            self.cache.keep(batch.slot, self._tensor(batch.starts), acceptance.path)
        if states is None or self._pending is None:
            return
        # an idle row may be a sequence's that has just been read, whose last state waits here
        pending = [s.pending if s and s.follows else self.catch_up_most for s in batch.rows]
        path = acceptance.path
        if draft.parents is not None:
            states = states.gather(1, path[:, :, None].expand(-1, -1, states.shape[-1]))
        place = (self._tensor(pending)[:, None] + torch.arange(states.shape[1], device=states.device)).clamp(
            max=self.catch_up_most
        )
        slots = torch.arange(batch.slot, batch.slot + len(batch.rows), device=states.device)[:, None]
        self._pending[slots, place] = states

    def _roots(self, batch: Batch) -> torch.Tensor:
        return self._tensor([s.ids[-1] if s else 0 for s in batch.rows])

    def compile_reading(self) -> None:
        """Has pieces of prompts that are read one at a time run compiled from now on, however long they are.

        Not tried on GPUs, where attention asks for masks of certain lengths.
        """
        if self.target.device.type != "cpu":
            return
        self._capture()
        self.target.compile(1, None)
        if self.drafter:
            self.drafter.compile(1, None, None)

    def compile(self, sequences: int, shape: DraftShape | None) -> None:
        """Has steps of so many sequences with a draft of this shape, or shorter ones, run compiled from now on."""
        self._capture()
        tokens = shape.num_draft_tokens if shape else 1
        sizes = self._compiled.setdefault(sequences, set())
        if self._width(sequences, tokens) not in sizes:
            self.target.compile(sequences, tokens)
            sizes.add(tokens)
        if shape and self.drafter:
            self.drafter.compile(sequences, catch_up_bucket(shape.num_steps + 1, self.catch_up_most), shape)

    def _width(self, sequences: int, tokens: int) -> int:
        """Tokens in a step that is compiled and takes these for nearly the same time; as many where there is none.

        The rows behind a sequence for drafts (``spare_rows``) hold those of any step that is compiled. Plain steps stay
        as they are: five tokens more cost one of SmolLM2's a twentieth.
        """
        if tokens == 1:
            return 1
        most = max(FEWEST // sequences, 1 << (tokens - 1).bit_length())
        return min((n for n in self._compiled.get(sequences, ()) if tokens <= n <= most), default=tokens)

    def _forward(self, block: Block, **how: Any) -> TargetOutput:
        self._capture()
        return self.target.forward(block, self.cache, **how)

    def _capture(self) -> None:
        """Always, where there is a drafter: it costs a copy; another set of layers would be another compiled step."""
        self.target.set_eagle3_layers_to_capture(self.drafter.layer_ids if self.drafter else None)

    def _tensor(self, values: Many[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.target.device)
