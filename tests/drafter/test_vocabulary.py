from __future__ import annotations

import numpy as np
import pytest

from eyas.drafter import vocabulary

IDS = np.array([1, 4, 5, 9])


def sound(offsets=None, mask=None, size=4, vocab=12) -> list[str]:
    offsets = vocabulary.offsets_from_ids(IDS) if offsets is None else offsets
    mask = vocabulary.membership(IDS, vocab) if mask is None else mask
    return vocabulary.problems(offsets, mask, size, vocab)


def test_offsets_and_ids_are_inverse() -> None:
    assert vocabulary.offsets_from_ids(IDS).tolist() == [1, 3, 3, 6]
    assert vocabulary.ids_from_offsets([1, 3, 3, 6]).tolist() == IDS.tolist()
    assert vocabulary.membership(IDS, 12).nonzero()[0].tolist() == IDS.tolist()


def test_sound_maps_have_no_problems() -> None:
    assert sound() == []
    assert vocabulary.problems(vocabulary.offsets_from_ids(IDS[::-1]), None, 4, 12) == []  # any order will do


def test_every_fault_is_named() -> None:
    assert "expected [5]" in sound(size=5)[0]
    assert "draft token 3 maps to target token 12, outside 0..11" in sound(offsets=np.array([1, 3, 3, 9]))[0]
    assert "outside" in sound(offsets=np.array([-1, 3, 3, 6]))[0]
    assert "1 draft tokens map to a target token that another one has" in sound(offsets=np.array([1, 0, 3, 6]))[0]
    assert "t2d: expected [12]" in sound(mask=np.ones(11, bool))[0]
    assert "disagrees with d2t on 2 tokens" in sound(mask=vocabulary.membership([1, 4, 5, 8], 12))[0]


def test_ids_in_place_of_offsets_are_recognised() -> None:
    problems = vocabulary.problems(IDS, vocabulary.membership(IDS, 12), 4, 12)
    assert any("seems to hold target ids" in problem for problem in problems)


def test_ids_without_a_mask_are_recognised_where_there_are_many() -> None:
    """Frequent tokens have neighbours, so that some offset comes twice; ids never do."""
    ids = np.unique(np.random.default_rng(0).integers(0, 5000, 400))[:300]
    assert not vocabulary.problems(vocabulary.offsets_from_ids(ids), None, 300, 9000)
    (said,) = vocabulary.problems(ids, None, 300, 9000)
    assert "seems to hold target ids" in said
    assert not vocabulary.problems(vocabulary.offsets_from_ids(np.arange(0, 100, 2)), None, 50, 100)  # few: who knows


def test_from_counts_takes_the_most_frequent_ascending() -> None:
    assert vocabulary.from_counts([5, 0, 9, 9, 1], 3).tolist() == [0, 2, 3]
    assert vocabulary.from_counts([5, 0, 9, 9, 1], 3, always=[1]).tolist() == [1, 2, 3]
    assert vocabulary.from_counts([0, 0, 7, 0], 3).tolist() == [0, 1, 2]  # more wanted than seen: lowest ids
    assert vocabulary.from_counts([1] * 500, 200).tolist() == list(range(200))


@pytest.mark.parametrize(("size", "always"), [(0, ()), (4, ()), (1, (0, 1))])
def test_from_counts_refuses_what_cannot_be(size: int, always: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected at least"):
        vocabulary.from_counts([1, 2, 3], size, always)
