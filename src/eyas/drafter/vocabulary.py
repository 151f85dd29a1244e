"""The draft vocabulary: which target tokens a drafter can propose.

Checkpoints hold it twice: ``d2t`` int64 [D], offsets (target id = i + d2t[i]), and ``t2d`` bool [V], its members.
Eyas works with the target ids themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ids = NDArray[np.int64]
_MANY = 256  # frequent tokens of which no two are neighbours: nobody has such a vocabulary


def ids_from_offsets(d2t: ArrayLike) -> Ids:
    """Target ids [D] from the offsets [D] of a checkpoint."""
    offsets = np.asarray(d2t, dtype=np.int64)
    return offsets + np.arange(len(offsets))


def offsets_from_ids(ids: ArrayLike) -> Ids:
    """The inverse of ``ids_from_offsets``: what a checkpoint's d2t holds."""
    targets = np.asarray(ids, dtype=np.int64)
    return targets - np.arange(len(targets))


def membership(ids: ArrayLike, vocab_size: int) -> NDArray[np.bool_]:
    """The mask [V] that a checkpoint's t2d holds."""
    mask = np.zeros(vocab_size, dtype=np.bool_)
    mask[np.asarray(ids, dtype=np.int64)] = True
    return mask


def problems(d2t: ArrayLike, t2d: ArrayLike | None, draft_vocab_size: int, vocab_size: int) -> list[str]:
    """What is wrong with a checkpoint's maps, one sentence each; empty when they are sound."""
    offsets = np.asarray(d2t)
    if offsets.shape != (draft_vocab_size,):
        return [f"d2t: expected [{draft_vocab_size}] (draft_vocab_size), found {list(offsets.shape)}"]
    ids = ids_from_offsets(offsets)
    found = _id_problems(ids, vocab_size)
    mask = None if t2d is None else np.asarray(t2d).astype(np.bool_)
    if mask is not None and mask.shape != (vocab_size,):
        return [*found, f"t2d: expected [{vocab_size}] (vocab_size), found {list(mask.shape)}"]
    if mask is not None and not found:
        differing = int((mask != membership(ids, vocab_size)).sum())
        if differing:
            found.append(f"t2d: disagrees with d2t on {differing} tokens: the two maps are of different vocabularies")
    scattered = mask is None and len(offsets) >= _MANY and bool((np.diff(offsets.astype(np.int64)) > 0).all())
    if (found or scattered) and not _id_problems(offsets, vocab_size):
        found.append("d2t: its numbers are distinct ids as they stand: it seems to hold target ids, not offsets from i")
    return found


def _id_problems(ids: Ids, vocab_size: int) -> list[str]:
    found = []
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        at = int(outside.argmax())
        found.append(
            f"d2t: draft token {at} maps to target token {ids[at]}, outside 0..{vocab_size - 1} "
            f"({int(outside.sum())} such tokens)"
        )
    repeated = len(ids) - len(np.unique(ids))
    if repeated:
        found.append(f"d2t: {repeated} draft tokens map to a target token that another one has already")
    return found


def from_counts(counts: ArrayLike, size: int, always: Sequence[int] = ()) -> Ids:
    """The ``size`` most frequent tokens of ``counts`` [V], ascending; ties go to the lower id.

    Tokens in ``always`` (end-of-text, template markers) are members whatever their count. Tokens never seen fill up a
    vocabulary larger than what was counted. Raises ValueError where ``size`` cannot be met.
    """
    frequency = np.asarray(counts, dtype=np.float64).copy()
    forced = sorted(set(always))
    if not len(forced) <= size <= len(frequency) or size < 1:
        raise ValueError(f"size {size}: expected at least {max(1, len(forced))} and at most {len(frequency)} tokens")
    frequency[forced] = np.inf
    return np.sort(np.argsort(-frequency, kind="stable")[:size]).astype(np.int64)
