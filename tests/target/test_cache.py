"""The slot cache against lists of rows."""

from __future__ import annotations

import random
from itertools import chain

import pytest
import torch

from eyas.core import TargetError
from eyas.target.cache import LayerShape, ProbeCache, SlotCache, StepCache

CPU = torch.device("cpu")
# Two layers alike, one with a value of another size (latent attention), one in another precision
SHAPES = {
    0: LayerShape(2, 4, 4, torch.float32, CPU),
    1: LayerShape(1, 12, 3, torch.float32, CPU),
    2: LayerShape(2, 4, 4, torch.float32, CPU),
    3: LayerShape(2, 4, 4, torch.bfloat16, CPU),
}
SLOTS, LENGTH = 4, 12
ROWS = SLOTS * LENGTH + 1  # they need not come out even

OfSlot = list[torch.Tensor | None]  # by row: [heads, size], or None for whatever memory held


class Naive:
    """What the cache must hold: for every layer, of keys and of values, one list of rows per slot."""

    def __init__(self) -> None:
        self.slots, self.length = 1, ROWS
        self.held: dict[tuple[int, int], list[OfSlot]] = {
            (layer, part): [[torch.zeros(shape.heads, size, dtype=shape.dtype) for _ in range(ROWS)]]
            for layer, shape in SHAPES.items()
            for part, size in enumerate((shape.key_size, shape.value_size))
        }

    def layout(self, slots: int, length: int) -> None:
        for held in self.held.values():
            for of_slot in held:
                of_slot[:] = [*of_slot[:length], *[None] * (length - self.length)]
            held[:] = [*held[:slots], *([None] * length for _ in range(slots - self.slots))]
        self.slots, self.length = slots, length

    def keep(self, slot: int, starts: list[int], path: list[list[int]]) -> None:
        for held in self.held.values():
            for of_slot, start, nodes in zip(held[slot:], starts, path, strict=False):
                of_slot[start : start + len(nodes)] = [of_slot[start + i] for i in nodes]

    def copy(self, source: int, dest: int, rows: int) -> None:
        for held in self.held.values():
            held[dest][:rows] = held[source][:rows]

    def clear(self, slot: int, count: int, start: int) -> None:
        for (layer, part), held in self.held.items():
            shape = SHAPES[layer]
            size = (shape.key_size, shape.value_size)[part]
            for of_slot in held[slot : slot + count]:
                of_slot[start:] = [torch.zeros(shape.heads, size, dtype=shape.dtype) for _ in of_slot[start:]]

    def assert_equal(self, layer: int, slot: int, got: tuple[torch.Tensor, torch.Tensor]) -> None:
        """``got``: keys and values ``[count, heads, length, size]`` of slots from ``slot`` on."""
        for part, of_part in enumerate(got):
            assert of_part.dtype == SHAPES[layer].dtype
            assert of_part.isfinite().all(), "memory that nobody wrote to"
            for of_slot, rows in zip(of_part, self.held[layer, part][slot:], strict=False):
                for i, row in enumerate(rows[: of_slot.shape[1]]):
                    assert row is None or torch.equal(of_slot[:, i], row)


class Pair:
    """The cache and its naive counterpart, doing the same."""

    def __init__(self, slots: int = 1, length: int = ROWS):
        self.cache, self.naive = SlotCache(SHAPES, ROWS), Naive()
        self.layout(slots, length)

    def layout(self, slots: int, length: int) -> None:
        self.cache.layout(slots, length)
        self.naive.layout(slots, length)
        assert (self.cache.slots, self.cache.length) == (slots, length)

    def append(self, slot: int, starts: list[int], count: int, length: int) -> None:
        """One forward pass's worth of writes, and what every layer is given to attend to."""
        views = self.cache.views(slot, len(starts), length)
        assert sorted(views) == sorted(SHAPES)
        step = StepCache(views, torch.tensor(starts))
        for layer, shape in SHAPES.items():
            sizes = (shape.key_size, shape.value_size)
            new = [torch.randn(len(starts), shape.heads, count, size).to(shape.dtype) for size in sizes]
            for part in (0, 1):
                for row, start in enumerate(starts):
                    of_slot = self.naive.held[layer, part][slot + row]
                    of_slot[start : start + count] = new[part][row].unbind(1)
            got = step.update(*new, layer)
            assert [t.shape for t in got] == [(len(starts), shape.heads, length, size) for size in sizes]
            self.naive.assert_equal(layer, slot, got)

    def fill(self) -> None:
        self.append(0, [0] * self.cache.slots, self.cache.length, self.cache.length)

    def keep(self, slot: int, starts: list[int], path: list[list[int]]) -> None:
        self.cache.keep(slot, torch.tensor(starts), torch.tensor(path, dtype=torch.long))
        self.naive.keep(slot, starts, path)

    def copy(self, source: int, dest: int, rows: int) -> None:
        self.cache.copy(source, dest, rows)
        self.naive.copy(source, dest, rows)

    def clear(self, slot: int, count: int, start: int) -> None:
        self.cache.clear(slot, count, start)
        self.naive.clear(slot, count, start)

    def assert_equal(self) -> None:
        for layer, got in self.cache.views(0, self.cache.slots, self.cache.length).items():
            assert got[0].shape[:3:2] == got[1].shape[:3:2] == (self.cache.slots, self.cache.length)
            self.naive.assert_equal(layer, 0, got)

    def known(self) -> int:
        """Rows whose contents are certain, which keeps a test from comparing nothing."""
        return sum(row is not None for row in chain.from_iterable(self.naive.held[0, 0]))


# Passes, paths, copies and layouts


@pytest.mark.parametrize("seed", range(6))
def test_a_random_walk_equals_lists_of_rows(seed):
    """Passes over neighbouring slots at places of their own, paths of unequal lengths, moves, and layouts between."""
    torch.manual_seed(seed)
    rng, pair = random.Random(seed), Pair(SLOTS, LENGTH)
    known = 0
    for turn in range(80):
        if turn % 8 == 7:
            slots = rng.randint(1, 8)
            pair.layout(slots, rng.randint(1, ROWS // slots))
        slots, length = pair.cache.slots, pair.cache.length
        slot = rng.randrange(slots)
        batch, count = rng.randint(1, slots - slot), rng.randint(1, min(5, length))
        starts = [rng.randint(0, length - count) for _ in range(batch)]
        pair.append(slot, starts, count, rng.randint(max(starts) + count, length))
        paths = [sorted(rng.sample(range(count), rng.randint(0, count))) for _ in starts]
        longest = max(map(len, paths))
        pair.keep(slot, starts, [path + [0] * (longest - len(path)) for path in paths])
        if rng.random() < 0.3:
            pair.copy(rng.randrange(slots), rng.randrange(slots), rng.randint(0, length))
        if rng.random() < 0.2:
            pair.clear(slot, batch, rng.randint(0, length))
        pair.assert_equal()
        known += pair.known()
    assert known > 80 * 8


@pytest.mark.parametrize("path", [[], [0], [0, 1, 2], [0, 2], [0, 2, 3], [2], [1, 2, 3], [0, 1, 4], [0, 3, 0]])
def test_keep_moves_each_ones_path_and_nothing_else(path):
    torch.manual_seed(0)
    pair = Pair(SLOTS, LENGTH)
    pair.fill()
    others = list(range(len(path)))  # a path that moves nothing
    pair.keep(1, [4, 7], [path, others])
    pair.assert_equal()
    pair.keep(1, [1, 2], [others, path])
    pair.assert_equal()


def test_keep_reaches_the_last_row():
    torch.manual_seed(0)
    pair = Pair(SLOTS, LENGTH)
    pair.fill()
    pair.keep(0, [LENGTH - 4, 0, LENGTH - 4, 5], [[0, 2, 3, 0], [0, 1, 3, 0], [3, 0, 0, 0], [0, 1, 2, 3]])
    pair.assert_equal()


@pytest.mark.parametrize("rows", [0, 1, 7, LENGTH])
def test_copy_moves_the_first_rows_of_one_slot(rows):
    torch.manual_seed(0)
    pair = Pair(SLOTS, LENGTH)
    pair.fill()
    pair.copy(3, 1, rows)
    pair.assert_equal()
    pair.copy(2, 2, rows)
    pair.assert_equal()


LAYOUTS = {
    "longer": (2, 20),
    "shorter": (4, 5),
    "fewer": (2, 12),
    "more": (16, 3),
    "one-long": (1, ROWS),
    "one-row-each": (ROWS, 1),
    "one-row": (1, 1),
    "fewer-but-longer-by-one": (3, 16),
    "the-same": (4, 12),
}


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("second", LAYOUTS)
def test_a_layout_keeps_what_fits(first, second):
    torch.manual_seed(0)
    pair = Pair(SLOTS, LENGTH)
    pair.fill()
    expected = SLOTS, LENGTH
    for name in (first, second):
        pair.layout(*LAYOUTS[name])
        pair.assert_equal()
        expected = min(expected[0], pair.cache.slots), min(expected[1], pair.cache.length)
        assert pair.known() == expected[0] * expected[1]
    pair.fill()
    pair.assert_equal()


def test_a_layout_takes_no_memory_of_its_own():
    cache = SlotCache(SHAPES, ROWS)
    nbytes = cache.nbytes

    def places() -> set[int]:
        views = cache.views(0, cache.slots, cache.length).values()
        return {t.untyped_storage().data_ptr() for pair in views for t in pair}

    before = places()
    for slots, length in LAYOUTS.values():
        cache.layout(slots, length)
        assert places() == before
        assert cache.nbytes == nbytes


def test_a_layout_that_does_not_fit_is_refused_and_changes_nothing():
    torch.manual_seed(0)
    pair = Pair(SLOTS, LENGTH)
    pair.fill()
    for slots, length in ((1, ROWS + 1), (ROWS + 1, 1), (5, 10)):
        with pytest.raises(ValueError, match=f"{slots} slots of {length} rows do not fit {ROWS} rows"):
            pair.cache.layout(slots, length)
    assert (pair.cache.slots, pair.cache.length) == (SLOTS, LENGTH)
    pair.assert_equal()


@pytest.mark.parametrize(
    ("slot", "count", "start"), [(1, 1, 0), (1, 2, 0), (0, 4, 0), (3, 1, 5), (1, 2, 11), (2, 1, 12)]
)
def test_clear_zeroes_these_slots_from_a_row_on(slot, count, start):
    """NaN among them: it must be overwritten, not multiplied."""
    torch.manual_seed(0)
    pair = Pair(SLOTS, LENGTH)
    pair.fill()
    for keys, values in pair.cache.views(slot, count, LENGTH).values():
        keys[:, :, start:] = torch.nan
        values[:, :, start:] = torch.inf
    pair.clear(slot, count, start)
    pair.assert_equal()


def test_clear_by_itself_zeroes_one_whole_slot():
    torch.manual_seed(0)
    pair = Pair(SLOTS, LENGTH)
    pair.fill()
    pair.cache.clear(2)
    pair.naive.clear(2, 1, 0)
    pair.assert_equal()


def test_a_pass_that_does_not_fit_reaches_no_other_slot():
    torch.manual_seed(0)
    pair = Pair(SLOTS, LENGTH)
    pair.fill()
    for starts, count, length in (([9], 4, LENGTH), ([11], 2, LENGTH), ([0], LENGTH + 1, LENGTH), ([3], 3, 5)):
        step = StepCache(pair.cache.views(1, 1, length), torch.tensor(starts))
        new = torch.zeros(1, 2, count, 4)
        with pytest.raises(IndexError):
            step.update(new, new, 0)
    pair.cache.copy(2, 1, LENGTH)  # what became of the slot itself does not matter
    pair.naive.copy(2, 1, LENGTH)
    pair.assert_equal()


def test_memory_is_what_the_shapes_say():
    cache = SlotCache(SHAPES, ROWS)
    per_token = sum(s.heads * (s.key_size + s.value_size) * s.dtype.itemsize for s in SHAPES.values())
    assert cache.nbytes == per_token * ROWS
    assert sum(shape.nbytes for shape in SHAPES.values()) == per_token


# What transformers sees of it


def test_what_mask_builders_ask():
    """They run for a block at the start of a slot, on views as long as it is."""
    step = StepCache(SlotCache(SHAPES, ROWS).views(0, 1, 3), torch.tensor([0]))
    assert step.get_seq_length() == step.get_seq_length(2) == step.get_query_offset(2) == 0
    assert step.get_mask_sizes(3, 0) == (3, 0)
    assert step.get_mask_sizes(torch.arange(3), 0) == (3, 0)
    assert step.get_max_length() == 3
    assert not step.is_compileable


@pytest.mark.parametrize(
    "ask", ["update_conv_state", "update_recurrent_state", "update_indexer", "get_conv_state", "has_previous_state"]
)
@pytest.mark.parametrize("make", [lambda: StepCache({}, torch.tensor([0])), ProbeCache], ids=["step", "probe"])
def test_state_that_cannot_be_rolled_back_is_refused(ask, make):
    with pytest.raises(TargetError, match="cannot be rolled back"):
        getattr(make(), ask)(torch.zeros(1), 0)


def test_the_probe_records_shapes_and_stores_nothing():
    probe = ProbeCache()
    for layer, shape in SHAPES.items():
        new = [torch.randn(1, shape.heads, 1, size).to(shape.dtype) for size in (shape.key_size, shape.value_size)]
        assert all(got is given for got, given in zip(probe.update(*new, layer), new, strict=True))
    assert probe.shapes == SHAPES
    assert probe.get_max_length() > 1 << 16
