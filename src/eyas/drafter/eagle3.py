"""EAGLE-3 at run time: the draft model with its own cache, growing chains and trees from the target's true states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eyas.core import Draft, DraftShape
from eyas.drafter.contract import SequenceView, TrueStates
from eyas.drafter.model import Eagle3Model
from eyas.speculation.sampling import perturbed
from eyas.speculation.tree import TreeBuilder
from eyas.target.cache import LayerShape, SlotCache
from eyas.target.contract import Block, Eagle3Target
from eyas.target.masks import visible


@dataclass(frozen=True)
class Tip:
    """What the drafter last computed from true states alone: where every draft of this sequence starts."""

    logits: torch.Tensor  # [1, draft vocabulary], for the token after the sequence's last one
    hidden: torch.Tensor  # [1, H], stands in for the state the target has not computed yet


class Eagle3Drafter:
    """Slot i of the drafter pairs the target's state at place i with the embedding of token i + 1, at position i.

    So a sequence whose target cache holds P tokens has P true slots here, and its newest slot used the bonus token.
    Draft-time slots are written behind them and overwritten by the next ``extend``.
    """

    def __init__(self, model: Eagle3Model):
        self.model = model
        self.layer_ids = model.aux_layer_ids
        self._tips: dict[int, Tip] = {}

    def start(self, target: Eagle3Target, slots: int, rows: int) -> None:
        embed, head = target.get_embed_and_head()
        self.model.bind(embed, head)
        config = self.model.config
        kind = (self.model.dtype, self.model.device)
        shape = LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim, *kind)
        self.model.reserve_positions(rows)
        self.cache = SlotCache(dict.fromkeys(range(config.num_hidden_layers), shape), slots, rows)
        self._tips.clear()

    def clear(self, slot: int) -> None:
        self.cache.clear(slot)

    def extend(self, sequence: SequenceView, true: TrueStates) -> None:
        count = len(true.tokens)
        embeds = self.model.embed(true.tokens)
        if true.image_mask is not None and true.embeds is not None and true.embeds.shape == embeds.shape:
            embeds = torch.where(true.image_mask[:, None], true.embeds.to(embeds.dtype), embeds)
        hidden = self.model.fuse(true.states[None])
        positions = torch.arange(true.start, true.start + count, device=embeds.device)[None]
        mask = None
        if count > 1:
            mask = visible(Block(true.tokens[None], (sequence.slot,), (true.start,), (0,)))[0][:, None]
        self.cache.begin((sequence.slot,), (true.start,), count)
        out = self.model(embeds[None], hidden, positions, mask, self.cache)
        self._tips[sequence.slot] = Tip(self.model.logits(out.normed[0, -1:]), out.next_hidden[0, -1:])

    def propose(self, sequences: Sequence[SequenceView], shape: DraftShape) -> list[Draft]:
        return [self._propose(sequence, shape) for sequence in sequences]

    def _propose(self, sequence: SequenceView, shape: DraftShape) -> Draft:
        builder = TreeBuilder(shape, sequence.last_token)
        tip = self._tips[sequence.slot]
        hidden = tip.hidden
        frontier = builder.expand(self._scores(sequence, builder, tip.logits), self.model.draft_to_target)
        tree = torch.zeros(
            1, 0, dtype=torch.bool, device=hidden.device
        )  # [frontier, draft-time slots]: own path so far
        for depth in range(1, shape.num_steps):
            count = len(frontier.tokens)
            start = sequence.length + tree.shape[1]
            mask = None
            if shape.eagle_topk > 1:
                own = torch.eye(count, dtype=torch.bool, device=hidden.device)
                tree = torch.cat([tree[frontier.rows], own], dim=1)
                mask = torch.cat([tree.new_ones(count, sequence.length), tree], dim=1)[None, None]
            else:  # a chain sees all that is before it
                tree = tree.new_zeros(1, depth)
            positions = torch.full((1, count), sequence.length - 1 + depth, device=hidden.device)
            self.cache.begin((sequence.slot,), (start,), count)
            embeds = self.model.embed(frontier.tokens)
            out = self.model(embeds[None], hidden[frontier.rows][None], positions, mask, self.cache)
            hidden = out.next_hidden[0]
            scores = self._scores(sequence, builder, self.model.logits(out.normed[0]), depth)
            frontier = builder.expand(scores, self.model.draft_to_target)
        return builder.finish()

    def _scores(
        self, sequence: SequenceView, builder: TreeBuilder, logits: torch.Tensor, depth: int = 0
    ) -> torch.Tensor:
        """Log-probability of each draft token being the one the target will choose, given the noise they share."""
        history = sequence.history
        if history is not None and depth:
            history = history.extended(builder.paths())
        weights = perturbed(
            logits,
            sequence.sampling,
            [sequence.output_index + depth] * len(logits),
            token_ids=self.model.draft_to_target,
            history=history,
            stop_ids=sequence.stop_ids,
        )
        return weights.log_softmax(-1)
