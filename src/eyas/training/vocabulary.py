"""What of a data set can be trained on, and which tokens a drafter of it should be able to propose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eyas.core import UsageError
from eyas.drafter.vocabulary import Ids, from_counts
from eyas.training.config import DRAFT_VOCAB
from eyas.training.dataset import DataError, Dataset


@dataclass(frozen=True)
class Survey:
    """One look at every row."""

    rows: np.ndarray  # int64, the numbers of those that can be trained on
    lengths: np.ndarray  # int32, of the same
    prompts: np.ndarray  # int32, of the same: tokens before the first that the target wrote
    written: np.ndarray  # int32, of the same: tokens that the target wrote
    counts: np.ndarray  # int64 [V], how often the target wrote each token in them
    too_long: int
    too_short: int  # nowhere did the target write two tokens in a row: nothing can be drafted

    def only(self, chosen: np.ndarray) -> Survey:
        """Of some of the rows; ``chosen`` bool. The counts stay."""
        parts = (self.rows[chosen], self.lengths[chosen], self.prompts[chosen], self.written[chosen])
        return Survey(*parts, self.counts, self.too_long, self.too_short)


def survey(data: Dataset, max_length: int | None = None) -> Survey:
    """Raises DataError where nothing is left to train on."""
    counts = np.zeros(data.manifest.vocab_size, np.int64)
    kept, prompts, written, long, short = list[int](), list[int](), list[int](), 0, 0
    for number, row in enumerate(data):
        if max_length is not None and len(row.ids) > max_length:
            long += 1
        elif not (row.mask[1:-1] & row.mask[2:]).any():  # behind a first token, which is nothing's draft
            short += 1
        else:
            kept.append(number)
            prompts.append(int(row.mask.argmax()))
            answer = row.ids[row.mask]
            written.append(len(answer))
            np.add.at(counts, answer, 1)
    if not kept:
        raise DataError(
            f"{data.folder} has nothing to train on: of {len(data):,} rows, {long:,} are longer than {max_length} "
            f"tokens and in {short:,} the target wrote no two tokens in a row."
        )
    rows = np.array(kept, np.int64)
    parts = (rows, data.lengths[rows], np.array(prompts, np.int32), np.array(written, np.int32))
    return Survey(*parts, counts, long, short)


def choose(counts: np.ndarray, size: int | None, always: Sequence[int] = ()) -> Ids:
    """Target ids, ascending, of a draft vocabulary of ``size`` tokens; None: the usual size, 0: all there are.

    ``always``: tokens that end an answer. Raises UsageError for more tokens than the target ever wrote: those beyond
    would be chosen by nothing but their number.
    """
    if size == 0:
        return np.arange(len(counts), dtype=np.int64)
    seen = np.union1d(np.flatnonzero(counts), np.asarray(always, np.int64))
    if size is None:
        size = min(DRAFT_VOCAB, len(seen))
    if size > len(counts):
        raise UsageError(f"The draft vocabulary cannot have {size:,} tokens: the target has {len(counts):,}.")
    if size > len(seen):
        raise UsageError(
            f"The draft vocabulary cannot have {size:,} tokens: the answers in the data hold {len(seen):,} different "
            "ones. Make it smaller, make more data, or take all of the target's (0)."
        )
    if size < len(set(always)):
        raise UsageError(f"The draft vocabulary needs room for the {len(set(always))} tokens that end an answer.")
    return from_counts(counts, size, always)


def coverage(counts: np.ndarray, ids: np.ndarray) -> float:
    """The share of what the target wrote that the vocabulary can propose."""
    return float(counts[ids].sum() / max(1, counts.sum()))
