"""EAGLE-3 at run time: the draft model with its own cache, growing chains and trees from the target's true states.

The arithmetic of ``follow`` and ``chain_tokens`` is functions from tensors to tensors, without a look at any value:
nothing in them waits for the device, and both fit into one compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from eyas.core import Draft, DraftShape
from eyas.drafter.contract import Drafting, TrueStates
from eyas.drafter.model import DraftStates, Eagle3Model
from eyas.speculation.sampling import Rows, draft_scores
from eyas.speculation.top import largest
from eyas.speculation.tree import Frontier, TreeBuilder, chain
from eyas.target.cache import LayerShape, SlotCache, StepCache
from eyas.target.compiling import ANY, SOME, Step, any_length, compiled
from eyas.target.contract import Eagle3Target

Views = dict[int, tuple[torch.Tensor, torch.Tensor]]  # by layer: keys and values [B, kv_heads, S, head_dim], to write
Choose = Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
"""From logits [B, 1, D] and the tokens [B, 1] drafted so far to columns [B, 1] of the draft vocabulary."""


class Eagle3Drafter:
    """Slot i of the drafter pairs the target's state at place i with the embedding of token i + 1, at position i.

    So a sequence whose target cache holds P tokens has P true rows here, and its newest row used the bonus token.
    Draft-time rows are written behind them and overwritten by the next ``extend``.

    A sequence's tip is what the newest true row came to: every draft starts there.
    """

    def __init__(self, model: Eagle3Model):
        self.model = model
        self.layer_ids = model.aux_layer_ids
        self._compiled: dict[tuple[str, int, int], Step] = {}  # by function, sequences, and tokens (or ANY) or steps

    @property
    def row_nbytes(self) -> int:
        return sum(shape.nbytes for shape in self._shapes().values())

    def start(self, target: Eagle3Target, rows: int) -> None:
        embed, head = target.get_embed_and_head()
        self.model.bind(embed, head)
        self._compiled.clear()
        self._states_dtype = embed.dtype  # the target's, which may be another than the drafter's
        # twice the context: longer slots must not change the table, which compiled code is made for
        most = target.context_length or self.model.config.max_position_embeddings
        self.model.reserve_positions(min(rows, 2 * most))
        self.cache = SlotCache(self._shapes(), rows)
        self._tips = DraftStates(self._no_tips(1), self._no_tips(1))

    def layout(self, slots: int, length: int, used: tuple[int, int] | None = None) -> None:
        self.cache.layout(slots, length, used)
        kept = min(slots, len(self._tips.normed))
        tips = DraftStates(self._no_tips(slots), self._no_tips(slots))
        for tip, old in zip(tips, self._tips, strict=True):
            tip[:kept] = old[:kept]
        self._tips = tips

    def copy(self, source: int, dest: int, rows: int) -> None:
        self.cache.copy(source, dest, rows)
        for tip in self._tips:
            tip[dest] = tip[source]

    def clear(self, slot: int, count: int = 1) -> None:
        self.cache.clear(slot, count)
        for tip in self._tips:  # idle slots are drafted for too: a broken tip would break their rows anew
            tip[slot : slot + count].zero_()

    def extend(self, true: TrueStates) -> None:
        embeds = self.model.embed(true.tokens)
        if true.image_mask is not None and true.embeds is not None and true.embeds.shape == embeds.shape:
            embeds = torch.where(true.image_mask[..., None], true.embeds.to(embeds.dtype), embeds)
        views, tips = self._slots(true.slot, len(true.tokens), true.length)
        sequences, count = true.tokens.shape
        any_count = self._compiled.get(("follow", sequences, ANY)) if count > 1 else None
        step = self._compiled.get(("follow", sequences, count)) or any_count or partial(follow, self.model)
        newest = step(views, self._columns(true.length), tips, true.starts, true.counts, true.states, embeds)
        for tip, new in zip(tips, newest, strict=True):
            tip.copy_(new)

    def propose(self, drafting: Drafting, shape: DraftShape) -> Draft:
        views, tips = self._slots(0, len(drafting.roots), drafting.length)
        if shape.eagle_topk > 1:
            return self._tree(views, tips, drafting, shape)
        choose, steps, columns = self._choice(drafting), shape.num_steps, self._columns(drafting.length)
        compiled_chain = self._compiled.get(("chain", len(drafting.roots), steps)) if choose is likeliest else None
        if compiled_chain is not None:
            tokens = compiled_chain(views, columns, tips, drafting.lengths, steps)
        else:
            tokens = chain_tokens(self.model, views, columns, tips, drafting.lengths, steps, choose)
        return chain(torch.cat([drafting.roots[:, None], tokens], dim=1))

    @torch.inference_mode()
    def compile(self, sequences: int, tokens: int | None, shape: DraftShape | None) -> None:
        """Has ``extend`` by so many tokens each (None: any number), and greedy chains of this shape, run compiled.

        For so many sequences, from now on.
        """
        config, size = self.model.config, tokens or ANY
        with torch.inference_mode(False):  # as those of an engine are; the compiler tells the two kinds apart
            cache = SlotCache(self.cache.shapes, sequences * 128)
            cache.layout(sequences, 128)
        views, columns = cache.views(0, sequences, 128), self._columns(96)
        any_length((part for pair in views.values() for part in pair), dim=2)
        any_length([columns], dim=0)
        tips = DraftStates(self._no_tips(sequences), self._no_tips(sequences))
        counts = torch.ones(sequences, dtype=torch.long, device=self.model.device)
        width = config.num_aux * config.target_hidden_size
        states = counts.new_zeros(sequences, tokens or SOME, width, dtype=self._states_dtype)
        embeds = counts.new_zeros(sequences, tokens or SOME, config.hidden_size, dtype=self.model.dtype)
        if tokens is None:
            any_length([states, embeds], dim=1)
        if ("follow", sequences, size) not in self._compiled:
            step = compiled(follow, self.model)
            step(views, columns, tips, 0 * counts, counts, states, embeds)
            self._compiled["follow", sequences, size] = step
        if shape and shape.eagle_topk == 1 and ("chain", sequences, shape.num_steps) not in self._compiled:
            step = compiled(greedy_chain, self.model)
            step(views, columns, tips, counts, shape.num_steps)
            self._compiled["chain", sequences, shape.num_steps] = step

    def _slots(self, slot: int, count: int, length: int) -> tuple[Views, DraftStates]:
        """What neighbouring slots hold, to read and write: their rows, and their tips [count, H]."""
        self.model.reserve_positions(length)  # no place lies behind its row
        here = slice(slot, slot + count)
        tips = DraftStates(self._tips.next_hidden[here], self._tips.normed[here])
        return self.cache.views(slot, count, self.cache.length), tips

    def _columns(self, length: int) -> torch.Tensor:
        """int64 [S]: the rows that are looked at."""
        return torch.arange(length, device=self.model.device)

    def _choice(self, drafting: Drafting) -> Choose:
        """How these sequences choose: by the largest logit, where nothing else can change which that is."""
        rows, allowed = drafting.rows, drafting.allowed
        sampled = [g for g in rows.groups if not g.params.greedy or g.params.logit_bias or g.params.min_tokens]
        ids, wanted = self.model.draft_to_target, allowed is not None or _any_history(rows)
        if not sampled and not wanted:
            return likeliest

        def choose(logits: torch.Tensor, path: Sequence[torch.Tensor]) -> torch.Tensor:
            paths = drafting.roots.new_empty(len(logits), 1, 0)
            if path and wanted:
                paths = torch.stack([*path], dim=-1)
            bits = allowed(paths) if allowed is not None else None
            return largest(draft_scores(logits, rows, len(path), token_ids=ids, paths=paths, allowed=bits))[1]

        return choose

    def _tree(self, views: Views, tips: DraftStates, drafting: Drafting, shape: DraftShape) -> Draft:
        """Level by level: the frontier's F nodes in one pass, each seeing the true rows and its own path."""
        model, lengths = self.model, drafting.lengths[:, None]
        builder = TreeBuilder(shape, drafting.roots)
        hidden, normed = (tip[:, None] for tip in tips)
        frontier = self._expanded(builder, normed, drafting, 0)
        count = frontier.tokens.shape[1]
        level = torch.arange(count, device=lengths.device)
        columns = self._columns(drafting.length)
        seen = columns < lengths[..., None]  # [B, F, S]: the rows that each node of the frontier before sees
        for depth in range(1, shape.num_steps):
            rows = lengths + (depth - 1) * count + level
            seen = _picked(seen, frontier.rows).scatter(2, rows[..., None], True)
            hidden, normed = model.run(
                model.embed(frontier.tokens),
                _picked(hidden, frontier.rows),
                model.rotations(lengths - 1 + depth),
                seen[:, None],
                StepCache(views, rows[:, 0], len(columns)),
            )
            frontier = self._expanded(builder, normed, drafting, depth)
        return builder.finish()

    def _expanded(self, builder: TreeBuilder, normed: torch.Tensor, drafting: Drafting, depth: int) -> Frontier:
        """The next frontier, from the last one's ``normed`` [B, F, H]."""
        rows, allowed, token_ids = drafting.rows, drafting.allowed, self.model.draft_to_target
        paths = builder.paths() if allowed is not None or _any_history(rows) else None
        bits = allowed(paths) if allowed is not None and paths is not None else None
        scores = draft_scores(self.model.logits(normed), rows, depth, token_ids=token_ids, paths=paths, allowed=bits)
        return builder.expand(scores, token_ids)

    def _shapes(self) -> dict[int, LayerShape]:
        """What each layer caches."""
        config, kind = self.model.config, (self.model.dtype, self.model.device)
        shape = LayerShape(config.num_key_value_heads, config.head_dim, config.head_dim, *kind)
        return dict.fromkeys(range(config.num_hidden_layers), shape)

    def _no_tips(self, slots: int) -> torch.Tensor:
        with torch.inference_mode(False):  # they outlive the step that makes them, and may be cleared between steps
            size = self.model.config.hidden_size
            return torch.zeros(slots, size, dtype=self.model.dtype, device=self.model.device)


def follow(
    model: Eagle3Model,
    views: Views,
    columns: torch.Tensor,
    tips: DraftStates,
    starts: torch.Tensor,
    counts: torch.Tensor,
    states: torch.Tensor,
    embeds: torch.Tensor,
) -> DraftStates:
    """Writes the rows of T true states into ``views``, whatever lies behind ``counts`` too; returns the new tips.

    columns: int64 [S], the rows that are looked at. tips: [B, H] each, kept where there is nothing new. starts, counts:
    int64 [B]. states: [B, T, ...] as the target has them. embeds: [B, T, H] of the tokens one place after.
    """
    index = torch.arange(embeds.shape[1], device=embeds.device)
    places = starts[:, None] + index
    padding = index >= counts[:, None]
    hidden = model.fuse(states).masked_fill(padding[..., None], 0)  # a NaN there would stay in the cache
    seen = columns <= places[..., None]
    cache = StepCache(views, starts, columns.shape[0])
    out = model.run(embeds, hidden, model.rotations(places), seen[:, None], cache)
    newest, anything = (counts - 1).clamp(min=0)[:, None], (counts > 0)[:, None]
    pairs = zip(tips, out, strict=True)
    return DraftStates(*(torch.where(anything, _picked(new, newest)[:, 0], old) for old, new in pairs))


def chain_tokens(
    model: Eagle3Model,
    views: Views,
    columns: torch.Tensor,
    tips: DraftStates,
    lengths: torch.Tensor,
    steps: int,
    choose: Choose,
) -> torch.Tensor:
    """int64 [B, steps]: the tokens drafted one after the other from tips [B, H] behind ``lengths`` int64 [B] true rows.

    Writes ``steps - 1`` rows into ``views``.
    """
    hidden, normed = (tip[:, None] for tip in tips)
    rows = lengths[:, None] + torch.arange(steps - 1, device=lengths.device)
    seen = (columns <= rows[..., None])[:, None]  # [B, 1, steps - 1, S]
    rope = model.rotations(rows)  # a chain's rows are its places
    path: list[torch.Tensor] = []
    for step in range(steps):
        if step > 0:
            now = slice(step - 1, step)
            cache = StepCache(views, rows[:, step - 1], columns.shape[0])
            hidden, normed = model.run(model.embed(path[-1]), hidden, rope[:, now], seen[:, :, now], cache)
        path.append(model.draft_to_target[choose(model.logits(normed), path)])
    return torch.cat(path, dim=1)


def greedy_chain(
    model: Eagle3Model, views: Views, columns: torch.Tensor, tips: DraftStates, lengths: torch.Tensor, steps: int
) -> torch.Tensor:
    return chain_tokens(model, views, columns, tips, lengths, steps, likeliest)


def likeliest(logits: torch.Tensor, path: Sequence[torch.Tensor]) -> torch.Tensor:
    """The greedy ``Choose``: int64 [B, 1]."""
    return largest(logits)[1]


def _picked(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """[B, F, X] of [B, T, X]: for each sequence the rows that ``index`` int64 [B, F] names."""
    return values[torch.arange(len(values), device=values.device)[:, None], index]


def _any_history(rows: Rows) -> bool:
    return any(group.history is not None for group in rows.groups)
