"""Draft trees: growing one level by level while the drafter runs, and what verification needs of a finished one.

All of it is batched, B sequences at a time with the same shape, and none of it waits for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.core import Draft, DraftShape
from eyas.speculation.top import largest


@dataclass(frozen=True)
class Frontier:
    """The nodes the drafter runs on next, best first. F is ``eagle_topk``, or less in a tiny vocabulary.

    There may be dead ones among them, kept for the fixed shape: their tokens can be embedded but mean nothing.
    """

    tokens: Tensor  # int64 [B, F], target token ids
    rows: Tensor  # int64 [B, F], the row of the previous frontier (0: the root) whose state and KV path it continues


class TreeBuilder:
    """Grows one draft for each of B sequences with SGLang's numbers.

    Every level expands the F frontier nodes by their F likeliest tokens each; all of these are candidates, and the F
    best by cumulative log-probability are the next frontier. ``finish`` keeps the best ``num_draft_tokens - 1``
    candidates (EAGLE-2, Li et al. 2024). ``eagle_topk`` 1 is a chain: the best token after the best token, whatever its
    probability, so that nothing needs to be normalised or sorted. Usage::

        builder = TreeBuilder(shape, roots)                      # [B]
        frontier = builder.expand(scores_after_root)             # [B, 1, V']
        for _ in range(shape.num_steps - 1):
            frontier = builder.expand(drafter(frontier))         # [B, F, V']
        draft = builder.finish()
    """

    def __init__(self, shape: DraftShape, roots: Tensor) -> None:
        """``roots`` is int64 [B], the last emitted tokens, on the device of the scores to come."""
        self.shape = shape
        self.roots = roots
        self._frontiers: list[Frontier] = []
        # Of trees only. Candidates are in creation order: a candidate's id is its place in all levels' concatenation.
        self._levels: list[_Level] = []
        self._frontier_ids = torch.full_like(roots, -1)[:, None]  # int64 [B, F], the frontier as candidates; -1: root
        self._frontier_totals = torch.zeros(roots.shape, device=roots.device)[:, None]  # float32 [B, F]

    def expand(self, scores: Tensor, token_ids: Tensor | None = None) -> Frontier:
        """Add a level below the last frontier (at first: below the root).

        Args:
            scores: float [B, F, V'], the perturbed draft log-weights after each frontier node. They need not be
                normalised. In a tree -inf and NaN never become nodes; a chain takes what it gets, as a node that cannot
                be accepted costs it nothing.
            token_ids: int64 [V'], the target ids of the columns. None: column = id.

        Returns:
            The next frontier.
        """
        if self.shape.eagle_topk == 1:
            columns = largest(scores)[1]
            frontier = Frontier(columns if token_ids is None else token_ids[columns], torch.zeros_like(columns))
        else:
            best = scores.topk(min(self.shape.eagle_topk, scores.shape[-1]))
            # Never above 0, so that no child scores above its parent: ``finish`` relies on it.
            logp = scores.log_softmax(-1, dtype=torch.float32).gather(-1, best.indices).clamp(max=0)
            logp = logp.nan_to_num(nan=-math.inf, neginf=-math.inf)
            tokens = best.indices if token_ids is None else token_ids[best.indices]
            frontier = self._add_level(tokens, self._frontier_totals[..., None] + logp)
        self._frontiers.append(frontier)
        return frontier

    def paths(self) -> Tensor:
        """int64 [B, F, depth]: the tokens from below the root to each frontier node, itself included (for penalties).

        [B, 1, 0] before the first level.
        """
        if not self._frontiers:
            return self.roots.new_empty(len(self.roots), 1, 0)
        columns = []
        rows = torch.arange(self._frontiers[-1].tokens.shape[1], device=self.roots.device).expand(len(self.roots), -1)
        for frontier in reversed(self._frontiers):
            columns.append(frontier.tokens.gather(1, rows))
            rows = frontier.rows.gather(1, rows)
        return torch.stack(columns[::-1], dim=-1)

    def finish(self) -> Draft:
        """The finished drafts, [B, N] with N = ``num_draft_tokens``, or less if the whole tree is smaller.

        Nodes are in level order: parents precede children and depths never decrease. Where a sequence has fewer live
        candidates the rest is padding: the root's token, without a parent, at depth 0.
        """
        if not self._levels:
            return chain(torch.cat((self.roots[:, None], *(frontier.tokens for frontier in self._frontiers)), dim=1))
        tokens, totals, parents, depths = (torch.cat(parts, dim=1) for parts in zip(*self._levels, strict=True))
        batch, count = totals.shape
        size = min(self.shape.num_draft_tokens - 1, count)
        # Best first. The sort is stable and candidates are in creation order, so a tie goes to the older one. A parent
        # is older than its child and scores at least as high: it sorts before it, and every prefix has its parents.
        best = totals.sort(dim=1, descending=True, stable=True)
        dead = best.values[:, :size] == -math.inf
        chosen, _ = best.indices[:, :size].masked_fill(dead, count).sort(dim=1)  # in level order, the dead at the end
        dead = chosen == count
        chosen = chosen.masked_fill(dead, 0)
        # From candidates to nodes; the root is candidate -1, here 0.
        nodes = torch.arange(1, size + 1, device=tokens.device).expand(batch, -1)
        node_of = torch.zeros(batch, count + 2, dtype=torch.int64, device=tokens.device)
        node_of.scatter_(1, (chosen + 1).masked_fill(dead, count + 1), nodes)
        node_parents = node_of.gather(1, parents.gather(1, chosen) + 1)
        roots = self.roots[:, None]
        return Draft(
            torch.cat((roots, tokens.gather(1, chosen).where(~dead, roots)), dim=1),
            torch.cat((torch.full_like(roots, -1), node_parents.masked_fill(dead, -1)), dim=1),
            torch.cat((torch.zeros_like(roots), depths.gather(1, chosen).masked_fill(dead, 0)), dim=1),
        )

    def _add_level(self, tokens: Tensor, totals: Tensor) -> Frontier:
        """tokens int64 and totals float32 [B, F, k]; F is 1 at the first level and k afterwards."""
        width = tokens.shape[-1]
        parents = self._frontier_ids.repeat_interleave(width, dim=1)
        tokens, totals = tokens.flatten(1), totals.flatten(1)
        count = sum(level.tokens.shape[1] for level in self._levels)
        self._levels.append(_Level(tokens, totals, parents, torch.full_like(tokens, len(self._levels) + 1)))
        order = totals.sort(dim=1, descending=True, stable=True).indices[:, :width]
        self._frontier_ids = count + order
        self._frontier_totals = totals.gather(1, order)
        return Frontier(tokens.gather(1, order), order // width if len(self._levels) > 1 else torch.zeros_like(order))


class _Level(NamedTuple):
    """The C candidates of one level."""

    tokens: Tensor  # int64 [B, C]
    totals: Tensor  # float32 [B, C], cumulative log-probability; -inf: dead, never a node
    parents: Tensor  # int64 [B, C], candidate ids; -1: the root
    depths: Tensor  # int64 [B, C]


def chain(tokens: Tensor) -> Draft:
    """Drafts without branches: int64 [B, N], first the root, each further token the child of the one before."""
    return Draft(tokens)


def ancestor_mask(draft: Draft) -> Tensor:
    """bool [B, N, N], True where the column is the row's node itself or an ancestor of it.

    On the draft's device. Padding descends from the root.
    """
    batch, count = draft.tokens.shape
    device = draft.tokens.device
    if draft.parents is None:
        return torch.ones(count, count, dtype=torch.bool, device=device).tril().expand(batch, -1, -1)
    mask = torch.eye(count, dtype=torch.bool, device=device).expand(batch, -1, -1)
    above = draft.parents.clamp(min=0)  # of the root and of padding: the root
    # After r rounds a node knows its next 2**r - 1 ancestors, and ``above`` is the one behind these.
    for _ in range((count - 1).bit_length()):
        mask = mask | mask.gather(1, above[:, :, None].expand(-1, -1, count))
        above = above.gather(1, above)
    return mask


def path_tokens(draft: Draft) -> Tensor:
    """int64 [B, N, N - 1] on the draft's device: the tokens from below the root to each node, itself included.

    Padded with -1. The root is not in it: as the last emitted token it is already part of the output history. Neither
    is padding, whose path is empty.
    """
    batch, count = draft.tokens.shape
    depths = torch.arange(count, device=draft.tokens.device).expand(batch, -1) if draft.depths is None else draft.depths
    # Each ancestor's token goes to the place of its depth; all the others' go behind the last place, and are cut off.
    on_path = ancestor_mask(draft) & (depths > 0)[:, None]
    places = (depths[:, None] - 1).where(on_path, count - 1)
    paths = torch.full((batch, count, count), -1, device=draft.tokens.device)
    return paths.scatter_(2, places, draft.tokens[:, None].expand(-1, count, -1))[..., : count - 1]
