"""Rows of a data set to batches: shuffled by seed and epoch, of similar lengths, packed into lines.

A batch is [B, T]: T is its longest row, and a line holds as many rows, one after the other, as fit. It depends on
lengths, seed and epoch alone, so a resumed training sees what an uninterrupted one would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eyas.training.dataset import Row

WINDOW = 32  # batches whose rows are sorted by length together: enough to be even, few enough to stay mixed


@dataclass(frozen=True)
class Batch:
    """Rows packed into B lines of T tokens."""

    tokens: torch.Tensor  # int64 [B, T]
    places: torch.Tensor  # int64 [B, T], a token's place in its row
    owners: torch.Tensor  # int64 [B, T], the number of its row in the data set; -1: padding
    ahead: torch.Tensor  # int64 [B, T], how many tokens in a row, right after it, the target wrote

    @property
    def count(self) -> int:
        """Tokens, without padding."""
        return int((self.owners >= 0).sum())

    @property
    def rows(self) -> list[int]:
        """The numbers of its rows in the data set."""
        return sorted(set(self.owners.flatten().tolist()) - {-1})

    def to(self, device: torch.device) -> Batch:
        return Batch(*(t.to(device, non_blocking=True) for t in (self.tokens, self.places, self.owners, self.ahead)))

    def seen(self) -> torch.Tensor:
        """bool [B, T, T]: a token sees its row up to itself. Padding sees padding: a softmax needs something."""
        return (self.owners[:, :, None] == self.owners[:, None, :]).tril()


def epoch_batches(lengths: Sequence[int] | np.ndarray, tokens: int, seed: int, epoch: int) -> list[tuple[int, ...]]:
    """The rows of each batch of an epoch, longest first; every row once.

    A batch has about ``tokens`` tokens, padding included, or a single row that is longer.
    """
    lengths = np.asarray(lengths)
    random = np.random.default_rng((seed, epoch))
    order = random.permutation(len(lengths))
    window = max(1, round(WINDOW * tokens / max(1.0, lengths.mean()))) if len(lengths) else 1
    batches: list[tuple[int, ...]] = []
    for start in range(0, len(order), window):
        some = order[start : start + window]
        batches += _cut(some[np.argsort(-lengths[some], kind="stable")].tolist(), lengths, tokens)
    return [batches[i] for i in random.permutation(len(batches))]


def pack(rows: Sequence[Row], numbers: Sequence[int]) -> Batch:
    """``rows``, longest first, as a batch; ``numbers`` are theirs in the data set."""
    lengths = [len(row.ids) for row in rows]
    lines = _Lines(lengths[0])
    for length in lengths:
        lines.add(length)
    shape = len(lines.room), lengths[0]
    tokens, places, ahead = (np.zeros(shape, np.int64) for _ in range(3))
    owners = np.full(shape, -1, np.int64)
    for row, number, (line, start) in zip(rows, numbers, lines.starts, strict=True):
        here = line, slice(start, start + len(row.ids))
        tokens[here], places[here], owners[here] = row.ids, np.arange(len(row.ids)), number
        ahead[here] = _ahead(row.mask)
    return Batch(*(torch.from_numpy(part) for part in (tokens, places, owners, ahead)))


def _cut(rows: Sequence[int], lengths: np.ndarray, tokens: int) -> Iterator[tuple[int, ...]]:
    """The first row of a batch sets T and with it the number of lines; the others fill these."""
    batch, lines = list[int](), _Lines(0)
    for row in rows:
        length = int(lengths[row])
        if not batch or not lines.fits(length, most=max(1, round(tokens / lines.size))):
            if batch:
                yield tuple(batch)
            batch, lines = [], _Lines(length)
        batch.append(row)
        lines.add(length)
    if batch:
        yield tuple(batch)


class _Lines:
    """Lines of ``size`` tokens, filled first fit."""

    def __init__(self, size: int):
        self.size = size
        self.room: list[int] = []  # by line, what is left
        self.starts: list[tuple[int, int]] = []  # of each that was added: its line, and where in it

    def fits(self, length: int, most: int) -> bool:
        return len(self.room) < most or any(left >= length for left in self.room)

    def add(self, length: int) -> None:
        line = next((i for i, left in enumerate(self.room) if left >= length), len(self.room))
        if line == len(self.room):
            self.room.append(self.size)
        self.starts.append((line, self.size - self.room[line]))
        self.room[line] -= length


def _ahead(wrote: np.ndarray) -> np.ndarray:
    """int64 [n]: for each place, how many True follow it before the next False or the end."""
    after = np.arange(1, len(wrote) + 1)
    ends = np.append(np.flatnonzero(~wrote), len(wrote))
    return ends[np.searchsorted(ends, after)] - after


class Course:
    """Which batches each update takes: ``group`` of them (devices x accumulation), epoch by epoch.

    What an epoch has beyond whole groups is left out of it.
    """

    def __init__(self, rows: np.ndarray, lengths: np.ndarray, *, tokens: int, seed: int, epochs: int, group: int):
        self._rows, self._lengths, self._tokens, self._seed, self._group = rows, lengths, tokens, seed, group
        self._updates = [len(self._batches(epoch)) // group for epoch in range(epochs)]
        self.steps = sum(self._updates)
        self._cached: tuple[int, list[tuple[int, ...]]] = (-1, [])

    def __getitem__(self, step: int) -> list[tuple[int, ...]]:
        """Row numbers in the data set of each batch of an update."""
        epoch = 0
        while step >= self._updates[epoch]:
            step -= self._updates[epoch]
            epoch += 1
        if self._cached[0] != epoch:
            self._cached = epoch, self._batches(epoch)
        group = self._cached[1][step * self._group : (step + 1) * self._group]
        return [tuple(self._rows[list(batch)].tolist()) for batch in group]

    def _batches(self, epoch: int) -> list[tuple[int, ...]]:
        return epoch_batches(self._lengths, self._tokens, self._seed, epoch)
