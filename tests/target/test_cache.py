"""The slot cache against lists of rows."""

from __future__ import annotations

import random

import pytest
import torch

from eyas.core import TargetError
from eyas.target.cache import LayerShape, ProbeCache, SlotCache

CPU = torch.device("cpu")
# Two layers alike, one with a value of another size (latent attention), one in another precision
SHAPES = {
    0: LayerShape(2, 4, 4, torch.float32, CPU),
    1: LayerShape(1, 12, 3, torch.float32, CPU),
    2: LayerShape(2, 4, 4, torch.float32, CPU),
    3: LayerShape(2, 4, 4, torch.bfloat16, CPU),
}
SLOTS, LENGTH = 3, 12


class Naive:
    """What the cache must hold, as one list of rows for every layer, slot and of keys and values."""

    def __init__(self) -> None:
        self.rows = {
            (layer, slot, part): [torch.zeros(shape.heads, size, dtype=shape.dtype) for _ in range(LENGTH)]
            for layer, shape in SHAPES.items()
            for slot in range(SLOTS)
            for part, size in enumerate((shape.key_size, shape.value_size))
        }

    def seen(self, layer: int, slots: tuple[int, ...], end: int) -> list[torch.Tensor]:
        """Keys and values ``[B, heads, end, size]``."""
        return [
            torch.stack([torch.stack(self.rows[layer, slot, part][:end], dim=1) for slot in slots]) for part in (0, 1)
        ]


def append(cache: SlotCache, naive: Naive, slots: tuple[int, ...], starts: tuple[int, ...], count: int) -> None:
    """One forward pass's worth of writes, and what every layer is given to attend to."""
    cache.begin(slots, starts, count)
    for layer, shape in SHAPES.items():
        new = [
            torch.randn(len(slots), shape.heads, count, size).to(shape.dtype)
            for size in (shape.key_size, shape.value_size)
        ]
        for row, (slot, start) in enumerate(zip(slots, starts, strict=True)):
            for part in (0, 1):
                naive.rows[layer, slot, part][start : start + count] = list(new[part][row].unbind(1))
        got = cache.update(*new, layer)
        for part, expected in enumerate(naive.seen(layer, slots, max(starts) + count)):
            assert got[part].dtype == shape.dtype
            assert torch.equal(got[part], expected)


def keep(cache: SlotCache, naive: Naive, slot: int, start: int, path: list[int]) -> None:
    cache.keep(slot, start, path)
    for (_, of_slot, _), rows in naive.rows.items():
        if of_slot == slot:
            rows[start : start + len(path)] = [rows[start + i].clone() for i in path]


def assert_all_equal(cache: SlotCache, naive: Naive) -> None:
    for layer in SHAPES:
        for slot in range(SLOTS):
            keys, values = (view[slot : slot + 1] for view in cache._views[layer])
            for got, expected in zip((keys, values), naive.seen(layer, (slot,), LENGTH), strict=True):
                assert torch.equal(got, expected)


def test_random_passes_and_paths_equal_lists_of_rows():
    torch.manual_seed(0)
    rng, cache, naive = random.Random(0), SlotCache(SHAPES, SLOTS, LENGTH), Naive()
    for _ in range(60):
        slots = tuple(rng.sample(range(SLOTS), rng.randint(1, SLOTS)))
        count = rng.randint(1, 5)
        starts = tuple(rng.randint(0, LENGTH - count) for _ in slots)
        append(cache, naive, slots, starts, count)
        for slot, start in zip(slots, starts, strict=True):
            path = sorted(rng.sample(range(count), rng.randint(0, count)))
            keep(cache, naive, slot, start, path)
        assert_all_equal(cache, naive)


@pytest.mark.parametrize("path", [[], [0], [0, 1, 2], [0, 2], [0, 2, 3], [2], [1, 2, 3], [0, 1, 4]])
def test_keep_moves_the_path_and_nothing_else(path):
    torch.manual_seed(0)
    cache, naive = SlotCache(SHAPES, SLOTS, LENGTH), Naive()
    for slot in range(SLOTS):
        append(cache, naive, (slot,), (0,), LENGTH)
    keep(cache, naive, 1, 4, path)
    assert_all_equal(cache, naive)


def test_clear_zeroes_one_slot():
    cache, naive = SlotCache(SHAPES, SLOTS, LENGTH), Naive()
    append(cache, naive, (0, 1, 2), (0, 0, 0), LENGTH)
    for (_, slot, _), rows in naive.rows.items():
        if slot == 1:
            rows[:] = [torch.zeros_like(row) for row in rows]
    for pool in cache._pools:
        for tensor in pool:
            tensor[:, 1, :, 3] = torch.nan
    cache.clear(1)
    assert_all_equal(cache, naive)


def test_a_pass_that_does_not_fit_is_refused_before_anything_is_written():
    cache, naive = SlotCache(SHAPES, SLOTS, LENGTH), Naive()
    append(cache, naive, (0,), (0,), LENGTH)
    for slots, starts, count in (((0,), (9,), 4), ((0, 1), (2, 11), 2), ((0,), (0,), LENGTH + 1)):
        with pytest.raises(ValueError, match=f"do not fit a slot of {LENGTH}"):
            cache.begin(slots, starts, count)
    assert_all_equal(cache, naive)


def test_memory_is_what_the_shapes_say():
    cache = SlotCache(SHAPES, SLOTS, LENGTH)
    per_token = sum(s.heads * (s.key_size + s.value_size) * s.dtype.itemsize for s in SHAPES.values())
    assert cache.nbytes == per_token * SLOTS * LENGTH


def test_what_mask_builders_ask():
    cache = SlotCache(SHAPES, SLOTS, LENGTH)
    assert cache.get_seq_length() == 0
    cache.begin((1,), (5,), 3)
    assert cache.get_seq_length(2) == cache.get_query_offset(2) == 5
    assert cache.get_mask_sizes(3, 0) == (8, 0)
    assert cache.get_mask_sizes(torch.arange(3), 0) == (8, 0)
    assert cache.get_max_length() == LENGTH
    assert not cache.is_compileable


@pytest.mark.parametrize(
    "ask", ["update_conv_state", "update_recurrent_state", "update_indexer", "get_conv_state", "has_previous_state"]
)
def test_state_that_cannot_be_rolled_back_is_refused(ask):
    with pytest.raises(TargetError, match="cannot be rolled back"):
        getattr(SlotCache(SHAPES, SLOTS, LENGTH), ask)(torch.zeros(1), 0)


def test_the_probe_records_shapes_and_stores_nothing():
    probe = ProbeCache()
    for layer, shape in SHAPES.items():
        new = [torch.randn(1, shape.heads, 1, size).to(shape.dtype) for size in (shape.key_size, shape.value_size)]
        assert all(got is given for got, given in zip(probe.update(*new, layer), new, strict=True))
    assert probe.shapes == SHAPES
    assert probe.nbytes == 0
