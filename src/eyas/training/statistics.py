"""How much of a kind a data set is: lengths, tokens, repetition, and what the prompts begin with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from eyas.training.dataset import Row

SAMPLE = 100_000  # loss tokens over which distinct n-grams are counted: their share falls with the amount of text
DRAFT_VOCABULARIES = (8_192, 16_384, 32_768)


def diversity(rows: Iterable[Row]) -> dict[str, Any]:
    """Figures of a data set, for its manifest and for people.

    ``distinct_n`` is the share of different n-grams among the first 100,000 loss tokens (Li et al. 2016);
    ``coverage`` how many of all loss tokens the most frequent 8,192 (16,384, 32,768) tokens make up.
    """
    kinds, openings, counts = Counter[str](), Counter[str](), Counter[int]()
    answers, turns, sample, sampled = list[int](), list[int](), list[np.ndarray](), 0
    for row in rows:
        kinds[str(row.provenance.get("kind", row.source))] += 1
        openings[" ".join(str(row.provenance.get("prompt", "")).lower().split()[:3])] += 1
        turns.append(int(row.provenance.get("turns", 1)))
        written = row.ids[row.mask]
        answers.append(len(written))
        values, times = np.unique(written, return_counts=True)
        counts.update(dict(zip(values.tolist(), times.tolist(), strict=True)))
        if sampled < SAMPLE:
            sample.append(written[: SAMPLE - sampled])
            sampled += len(sample[-1])
    if not answers:
        return {}
    return {
        "kinds": dict(kinds.most_common()),
        "turns_mean": round(float(np.mean(turns)), 2),
        "loss_tokens_per_row": {f"p{q}": int(np.percentile(answers, q)) for q in (5, 50, 95)},
        "different_openings": round(len(openings) / len(answers), 4),
        **{f"distinct_{n}": _distinct(sample, n) for n in (1, 2, 3)},
        "different_tokens": len(counts),
        "coverage": _coverage(counts),
    }


def _distinct(texts: list[np.ndarray], n: int) -> float:
    """Different n-grams over all, none of them across two texts."""
    grams = [np.lib.stride_tricks.sliding_window_view(text, n) for text in texts if len(text) >= n]
    if not grams:
        return 0.0
    together = np.concatenate(grams)
    return round(len(np.unique(together, axis=0)) / len(together), 4)


def _coverage(counts: Counter[int]) -> dict[str, float]:
    ordered = np.sort(np.fromiter(counts.values(), np.int64))[::-1]
    return {str(size): round(float(ordered[:size].sum() / ordered.sum()), 4) for size in DRAFT_VOCABULARIES}
