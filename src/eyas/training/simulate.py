"""From one recording: what drafts of any shape would have been accepted, without running any of them.

Chains come out to the token. Of trees only the true branch was recorded: the others are taken to be as sure of
themselves as it is, which decides what is pruned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eyas.core import DraftShape, UsageError
from eyas.engine.stats import AcceptanceStats
from eyas.speculation.cost import AcceptanceRates, expected_tokens
from eyas.speculation.tree import TreeBuilder
from eyas.speculation.verify import accept
from eyas.training.recording import BEHIND, Recording

PLACES = 4096  # whose trees are built at once
REST = 64  # columns that share what the recorded ones leave of a distribution


@dataclass(frozen=True)
class Simulated:
    """A shape's acceptance, counted as the engine counts it, and the rates that ``speculation.cost`` predicts from."""

    shape: DraftShape
    stats: AcceptanceStats
    rates: AcceptanceRates

    @property
    def acceptance_length(self) -> float:
        return self.stats.acceptance_length

    @property
    def expected_tokens(self) -> float:
        """What the cost model makes of the rates: a little more, as no answer's end cuts off what was accepted."""
        return expected_tokens(self.shape, self.rates)


def simulate(recordings: Sequence[Recording], shapes: Iterable[DraftShape]) -> list[Simulated]:
    """Each shape's acceptance over all answers. UsageError for one that is deeper or wider than was recorded."""
    ranks = np.concatenate([recording.ranks for recording in recordings])
    logps = np.concatenate([recording.logps for recording in recordings])
    counts = [len(recording.ranks) for recording in recordings]
    simulated = []
    for shape in shapes:
        if shape.num_steps > ranks.shape[1] or shape.eagle_topk > logps.shape[2]:
            held = f"{ranks.shape[1]} steps and top-k {logps.shape[2]}"
            raise UsageError(f"The recording holds {held}, which is not enough for {shape}.")
        hits = chain_hits(ranks, shape) if shape.eagle_topk == 1 else tree_hits(ranks, logps, shape)
        stats, visited = walk(hits, counts, shape)
        simulated.append(Simulated(shape, stats, rates(ranks[visited], hits[visited], shape)))
    return simulated


def chain_hits(ranks: np.ndarray, shape: DraftShape) -> np.ndarray:
    """int64 [R]: how many tokens of a chain from each place are right in a row."""
    return (ranks[:, : shape.num_steps] == 0).cumprod(1).sum(1)


def tree_hits(ranks: np.ndarray, logps: np.ndarray, shape: DraftShape) -> np.ndarray:
    """int64 [R]: how far the true branch of a tree from each place goes, by the engine's own builder and accept rule.

    A token is its rank here.
    """
    found = []
    for start in range(0, len(ranks), PLACES):
        truth = torch.from_numpy(ranks[start : start + PLACES])
        columns = _with_rest(torch.from_numpy(logps[start : start + PLACES]))
        builder, width = TreeBuilder(shape, torch.zeros(len(truth), dtype=torch.int64)), 1
        for step in range(shape.num_steps):
            width = builder.expand(columns[:, step, None].expand(-1, width, -1)).tokens.shape[1]
        draft = builder.finish()
        assert draft.depths is not None
        behind = torch.nn.functional.pad(truth[:, : shape.num_steps], (0, 1), value=-1)  # nothing is below the deepest
        found.append(accept(draft, behind.gather(1, draft.depths)).counts.numpy() - 1)
    return np.concatenate(found)


def _with_rest(logps: torch.Tensor) -> torch.Tensor:
    """[R, D, K + REST]: what is left of the distribution in columns that are never among the first K."""
    left = (1 - logps.exp().sum(-1, keepdim=True)).clamp(min=0)
    each = torch.minimum((left / REST).log(), logps[..., -1:] - 1e-3)
    return torch.cat((logps, each.expand(*logps.shape[:2], REST)), dim=-1)


def walk(hits: np.ndarray, counts: Sequence[int], shape: DraftShape) -> tuple[AcceptanceStats, np.ndarray]:
    """Decodes every answer again: the verify steps a run makes, and the places they start from, int64 [steps].

    ``counts`` are the places of each answer, one for each token that is to be emitted after the first.
    """
    stats, visited, begin = AcceptanceStats(), [], 0
    for count in counts:
        place = begin
        while place < begin + count:
            right = int(hits[place])
            emitted = min(right + 1, begin + count - place)
            stats.record(shape.num_steps, shape.num_draft_tokens - 1, right, emitted)
            visited.append(place)
            place += emitted
        begin += count
    return stats, np.array(visited, dtype=np.int64)


def rates(ranks: np.ndarray, hits: np.ndarray, shape: DraftShape) -> AcceptanceRates:
    """The chances of each rank by depth at the places a run with this shape drafts from, and what its trees bring.

    ranks int64 [N, D] and hits int64 [N] are those of these places. A depth that no draft reached has no chances.
    """
    rows: list[tuple[float, ...]] = []
    right = np.ones(len(ranks), dtype=bool)  # so far, within the ranks that can be in the draft
    for depth in range(shape.num_steps):
        right &= ranks[:, depth] != BEHIND
        here = ranks[right, depth]
        rows.append(tuple(float((here == rank).mean()) if len(here) else 0.0 for rank in range(shape.eagle_topk)))
        right &= (ranks[:, depth] >= 0) & (ranks[:, depth] < shape.eagle_topk)
    model = AcceptanceRates(tuple(rows))
    modelled = expected_tokens(shape, model) - 1
    whole = ranks[:, shape.num_steps - 1] != BEHIND
    if shape.eagle_topk == 1 or not modelled or not whole.any():
        return model
    return AcceptanceRates(model.by_rank, tree=float(hits[whole].mean()) / modelled)
