"""Draft trees: growing one level by level while the drafter runs, and what verification needs of a finished one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from eyas.core import Draft, DraftShape


@dataclass(frozen=True)
class Frontier:
    """The nodes the drafter runs on next, best first. F is ``eagle_topk``, or less in a tiny vocabulary."""

    tokens: Tensor  # int64 [F], target token ids
    rows: Tensor  # int64 [F], the row of the previous frontier (0: the root) whose state and KV path each one continues
    scores: Tensor  # float32 [F], cumulative log-probability; -inf: a dead row, kept for its fixed shape, never a node


class TreeBuilder:
    """Grows one draft with SGLang's numbers.

    Every level expands the F frontier nodes by their F likeliest tokens each; all of these are candidates, and the F
    best by cumulative log-probability are the next frontier. ``finish`` keeps the best ``num_draft_tokens - 1``
    candidates (EAGLE-2, Li et al. 2024). ``eagle_topk`` 1 is a chain.

    Nothing waits for the device before ``finish``. Usage::

        builder = TreeBuilder(shape, root_token)
        frontier = builder.expand(scores_after_root)             # [V'] or [1, V']
        for _ in range(shape.num_steps - 1):
            frontier = builder.expand(drafter(frontier))         # [F, V']
        draft = builder.finish()
    """

    def __init__(self, shape: DraftShape, root_token: int) -> None:
        self.shape = shape
        self.root_token = root_token
        self._frontiers: list[Frontier] = []
        self._frontier_ids: Tensor | None = None  # int64 [F], the frontier as candidates
        # The candidates of each level, flat. A candidate's id is its position in all levels' concatenation.
        self._tokens: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []  # candidate ids; -1: the root
        self._count = 0

    def expand(self, scores: Tensor, token_ids: Tensor | None = None) -> Frontier:
        """Add a level below the last frontier (at first: below the root).

        Args:
            scores: float [F, V'] (or [V'] for one row), log_softmax of the perturbed draft log-weights, a row for each
                frontier node. -inf and NaN never become nodes.
            token_ids: int64 [V'], the target ids of the columns. None: column = id.

        Returns:
            The next frontier.
        """
        scores = scores.reshape(-1, scores.shape[-1])
        best = scores.topk(min(self.shape.eagle_topk, scores.shape[1]))
        tokens = best.indices if token_ids is None else token_ids[best.indices]
        # A child must not score above its parent, whatever the caller's rounding: ``finish`` relies on it.
        totals = best.values.float().nan_to_num(nan=-math.inf, neginf=-math.inf).clamp(max=0)
        if self._frontiers:
            totals = totals + self._frontiers[-1].scores[:, None]
        return self._add_level(tokens, totals)

    def paths(self) -> Tensor:
        """int64 [F, depth]: the tokens from below the root to each frontier node, itself included (for penalties)."""
        columns: list[Tensor] = []
        rows: Tensor | slice = slice(None)
        for frontier in reversed(self._frontiers):
            columns.append(frontier.tokens[rows])
            rows = frontier.rows[rows]
        return torch.stack(columns[::-1], dim=1) if columns else torch.empty(1, 0, dtype=torch.int64)

    def finish(self) -> Draft:
        """The finished draft, on the scores' device (one wait for it); smaller than asked where candidates ran out.

        Level order: parents precede children and depths never decrease.
        """
        if not self._tokens:
            return chain([self.root_token])
        # One transfer for all: float64 holds token ids, candidate ids and float32 scores exactly.
        parts = [torch.cat(part).double() for part in (self._tokens, self._scores, self._parents)]
        tokens, totals, parents = torch.stack(parts).tolist()
        # Best first. The sort is stable and candidates are in creation order, so a tie goes to the older one. A parent
        # is older than its child and scores at least as high: it sorts before it, and every prefix has its parents.
        ranked = sorted((c for c, total in enumerate(totals) if total > -math.inf), key=lambda c: -totals[c])
        chosen = sorted(ranked[: self.shape.num_draft_tokens - 1])
        node = {-1: 0} | {candidate: i for i, candidate in enumerate(chosen, start=1)}
        node_parents, depths = [-1], [0]
        for candidate in chosen:
            parent = node[int(parents[candidate])]
            node_parents.append(parent)
            depths.append(depths[parent] + 1)
        ids = [self.root_token, *(int(tokens[candidate]) for candidate in chosen)]
        return Draft(torch.tensor(ids, device=self._tokens[0].device), tuple(node_parents), tuple(depths))

    def _add_level(self, tokens: Tensor, totals: Tensor) -> Frontier:
        """tokens int64 [F, k], totals float32 [F, k]; F is 1 at the first level and k afterwards."""
        rows, width = tokens.shape
        tokens, totals = tokens.flatten(), totals.flatten()
        if rows == 1:  # the first level, and all of a chain: the top-k is the frontier, as it is
            order = torch.arange(width, device=tokens.device)
            frontier = Frontier(tokens, torch.zeros_like(order), totals)
        else:
            order = totals.sort(descending=True, stable=True).indices[:width]
            frontier = Frontier(tokens[order], order // width, totals[order])
        if self._frontier_ids is None:
            parents = torch.full_like(tokens, -1)
        else:
            parents = self._frontier_ids.repeat_interleave(width)
        self._tokens.append(tokens)
        self._scores.append(totals)
        self._parents.append(parents)
        self._frontiers.append(frontier)
        self._frontier_ids = self._count + order
        self._count += len(tokens)
        return frontier


def chain(tokens: Sequence[int] | Tensor, device: torch.device | str | None = None) -> Draft:
    """A draft without branches: ``tokens[0]`` is the root, each further token the child of the one before."""
    ids = torch.as_tensor(tokens, dtype=torch.int64, device=device)
    return Draft(ids, tuple(range(-1, len(ids) - 1)), tuple(range(len(ids))))


@lru_cache(maxsize=256)
def ancestor_mask(parents: tuple[int, ...]) -> Tensor:
    """bool [N, N] on the CPU, True where the column is the row's node itself or an ancestor of it.

    The result is cached and shared (chains come again and again): do not write to it.
    """
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    mask[:, 0] = True  # everyone descends from the root, so the paths' padding may point at it
    return mask.scatter_(1, _path_nodes(parents), True)


def path_tokens(draft: Draft) -> Tensor:
    """int64 [N, max depth] on the draft's device: the tokens from below the root to each node, itself included.

    Padded with -1. The root is not in it: as the last emitted token it is already part of the output history.
    """
    nodes = _path_nodes(draft.parents).to(draft.tokens.device)
    return torch.where(nodes > 0, draft.tokens[nodes], -1)


@lru_cache(maxsize=256)
def _path_nodes(parents: tuple[int, ...]) -> Tensor:
    """int64 [N, max depth]: the same as node indices, padded with 0."""
    paths: list[list[int]] = [[]]
    for node, parent in enumerate(parents[1:], start=1):
        paths.append([*paths[parent], node])
    depth = max(map(len, paths))
    return torch.tensor([path + [0] * (depth - len(path)) for path in paths], dtype=torch.int64).view(len(paths), depth)
