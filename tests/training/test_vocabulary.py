from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from training import sets

from eyas.core import UsageError
from eyas.training.dataset import Row
from eyas.training.vocabulary import choose, coverage, survey


def row(ids: list[int], mask: str) -> Row:
    return Row(np.array(ids, np.int32), np.array([c == "x" for c in mask]))


def test_counts_what_the_target_wrote(tmp_path: Path) -> None:
    rows = [
        row([1, 2, 3, 3], ".xxx"),
        row([4, 5, 6, 7, 8], ".x.x."),
        row([9] * 20, "." + "x" * 19),
        row([3, 3, 5], "x.x"),
        row([3, 5, 1], "xx."),  # what could be drafted here has no root
    ]
    found = survey(sets.write(tmp_path / "d", rows), max_length=10)
    assert found.rows.tolist() == [0] and found.lengths.tolist() == [4] and found.prompts.tolist() == [1]
    assert found.written.tolist() == [3]
    assert found.counts[[1, 2, 3, 9]].tolist() == [0, 1, 2, 0], "not prompts, nor rows that are left out"
    assert (found.too_long, found.too_short) == (1, 3)


def test_the_most_frequent_and_what_ends_an_answer() -> None:
    counts = np.array([0, 5, 9, 5, 0, 1, 7])
    assert choose(counts, 3).tolist() == [1, 2, 6], "the lower id of equals"
    assert choose(counts, 3, always=(4,)).tolist() == [2, 4, 6]
    assert choose(counts, None).tolist() == [1, 2, 3, 5, 6], "all that were seen, where there are few"
    assert choose(counts, 0).tolist() == list(range(7))
    assert coverage(counts, np.array([2, 4, 6])) == pytest.approx(16 / 27)


@pytest.mark.parametrize(("size", "words"), [(6, "hold 5 different"), (8, "the target has 7"), (1, "room for the 2")])
def test_sizes_that_cannot_be(size: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        choose(np.array([0, 5, 9, 5, 0, 1, 7]), size, always=(2, 3))
