"""The scheduler against a naive model of both caches: which tokens really are in which slot."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from engine.harness import plant
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.core import Request, SamplingParams
from eyas.engine import scheduler as module
from eyas.engine.scheduler import (
    BATCHES,
    SHARED_AT_LEAST,
    Chunk,
    Copy,
    Layout,
    Plan,
    Prefix,
    Scheduler,
    length_bucket,
    slot_bucket,
    slot_length,
)
from eyas.engine.sequence import Sequence

GARBAGE = "garbage"


IMAGE = 9  # a token that stands for a piece of one
PIECES = 4


def rows_for(ids: Many[int], image: str, start: int, end: int) -> list[int]:
    """What the target keeps for places: each row depends on all tokens up to there, and on the image."""
    return [hash((image, *ids[: place + 1])) for place in range(start, end)]


def drafter_rows(ids: Many[int], image: str, start: int, end: int) -> list[int]:
    """What the drafter keeps: it depends on the token behind the place too."""
    return [hash(("drafter", image, *ids[: place + 2])) for place in range(start, end)]


@dataclass
class Slots:
    """One cache: rows by slot. Whatever was not written is garbage."""

    rows: list[list[Any]] = field(default_factory=list)
    length: int = 0

    def layout(self, slots: int, length: int) -> None:
        self.rows = [kept[:length] + [GARBAGE] * (length - len(kept)) for kept in self.rows[:slots]]
        self.rows += [[GARBAGE] * length for _ in range(slots - len(self.rows))]
        self.length = length

    def copy(self, source: int, dest: int, rows: int) -> None:
        assert source != dest and rows <= self.length
        self.rows[dest][:rows] = self.rows[source][:rows]

    def write(self, slot: int, start: int, values: Many[Any]) -> None:
        assert start >= 0 and start + len(values) <= self.length, "rows that are not there"
        self.rows[slot][start : start + len(values)] = values


@dataclass(frozen=True)
class Sizes:
    rows: int
    spare: int = 8
    running: int = 4
    chunk: int = 24
    context: int = 100
    followed: float = 0.7  # share of the prompts that the drafter reads
    images: float = 0.1


class Model:
    """Requests come, go and are answered at random; everything the scheduler says is carried out and checked."""

    def __init__(self, sizes: Sizes, seed: int):
        self.sizes, self.random = sizes, random.Random(f"{sizes} {seed}")
        follow = lambda: self.random.random() < sizes.followed  # noqa: E731
        self.scheduler = Scheduler(sizes.rows, sizes.spare, sizes.running, sizes.chunk, follow)
        self.target, self.drafter = Slots(), Slots()
        self.texts = [[self.random.randrange(3) for _ in range(50)] for _ in range(4)]  # what prompts begin with
        self.alive: dict[int, Sequence] = {}
        self.count = 0
        self.seen: Counter[str] = Counter()

    # What happens

    def arrive(self) -> None:
        rng, sizes = self.random, self.sizes
        beginning = rng.choice(self.texts)
        ids = beginning[: rng.randrange(len(beginning) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
        ids = ids[: sizes.context - 2]
        image = rng.choice("ab") if rng.random() < sizes.images else ""
        if image:
            at = rng.choice([4, 20])
            ids[at:at] = [IMAGE] * PIECES
            ids = ids[: sizes.context - 2]
        room = sizes.context - len(ids)
        sampling = SamplingParams(max_tokens=rng.choice([1, 2, rng.randrange(1, room + 1), room]))
        request = Request(str(self.count), ids, sampling, speculate=rng.random() < 0.8)
        sequence = Sequence(request, self.count, sizes.context, (), None, None, image_key=image)
        self.count += 1
        self.alive[sequence.number] = sequence
        self.scheduler.add(sequence)

    def abort(self) -> None:
        sequence = self.random.choice(list(self.alive.values()))
        sequence.finish_reason = "abort"
        self.end(sequence, sequence.length)
        self.seen["aborts"] += 1

    def end(self, sequence: Sequence, rows: int) -> None:
        if sequence.slot >= 0 and rows == 0:  # broken: nothing of it may be used again
            self.target.write(sequence.slot, 0, [GARBAGE] * self.target.length)
        self.scheduler.finish(sequence, rows)
        del self.alive[sequence.number]
        if self.random.random() < 0.3:
            self.texts[self.random.randrange(len(self.texts))] = sequence.ids[:80]

    def step(self) -> None:
        before = {s.number: s.length for s in self.scheduler.running.values()}
        longest = [len(s.ids) for s in self.scheduler.running.values()]
        preemptions = self.scheduler.preemptions
        plan = self.scheduler.schedule()
        if self.scheduler.preemptions > preemptions:
            self.seen["preemptions"] += 1
            need = slot_length(max(longest) + self.sizes.spare)
            assert self.sizes.rows // need < len(longest), "put back without need"
        self.carry_out(plan)
        self.check(plan, before)
        for group in plan.groups:
            self.read(group)
        if plan.decode:
            self.decode(plan)
        self.scheduler.check()

    def carry_out(self, plan: Plan) -> None:
        for move in plan.moves:
            self.seen[type(move).__name__] += 1
            for slots in (self.target, self.drafter):
                if isinstance(move, Layout):
                    assert move.slots * move.length <= self.sizes.rows
                    slots.layout(move.slots, move.length)
                else:
                    slots.copy(move.source, move.dest, move.rows)

    def read(self, group: Many[Chunk]) -> None:
        """The shorter ones are padded: behind them is garbage."""
        width = max(chunk.count for chunk in group)
        assert [c.sequence.slot for c in group] == [group[0].sequence.slot + i for i in range(len(group))]
        assert len(group) == 1 or not any(c.sequence.image_key for c in group)
        self.seen["groups"] += len(group) > 1
        for chunk in group:
            self.target.write(chunk.sequence.slot, chunk.start, [GARBAGE] * width)
            self.drafter.write(chunk.sequence.slot, chunk.start, [GARBAGE] * width)
            self.read_one(chunk.sequence, chunk.count)

    def read_one(self, sequence: Sequence, count: int) -> None:
        start, ids = sequence.length, sequence.ids
        assert 0 < count <= len(ids) - start
        if sequence.image_key and start == 0:
            assert IMAGE not in ids[count:], "an image that is split"
            sequence.rope_delta = hash(sequence.image_key)
        self.target.write(sequence.slot, start, rows_for(ids, sequence.image_key, start, start + count))
        sequence.length += count
        if sequence.follows:
            known = min(count, len(ids) - start - 1)
            self.drafter.write(sequence.slot, start, drafter_rows(ids, sequence.image_key, start, start + known))
            sequence.pending = count - known
        if sequence.length == len(ids):
            sequence.decoding = True
            self.emit(sequence, 1)

    def decode(self, plan: Plan) -> None:
        """One step for all, with or without a draft; idle rows are written too."""
        rng, scheduler = self.random, self.scheduler
        starts = scheduler.starts(plan.bucket, self.sizes.spare)
        nodes = rng.choice([1, rng.randrange(1, self.sizes.spare + 1)])
        drafting = nodes > 1
        decoded = {s.slot for s in plan.decode}
        for slot, start in enumerate(starts):
            if slot not in decoded:
                self.target.write(slot, start, [GARBAGE] * nodes)
                if drafting:
                    self.drafter.write(slot, start, [GARBAGE] * self.sizes.spare)
        for sequence in plan.decode:
            slot, length = sequence.slot, sequence.length
            assert starts[slot] == length
            if sequence.follows and (drafting or sequence.pending >= self.sizes.spare):
                self.catch_up(sequence)
            if drafting:
                self.drafter.write(slot, length, [GARBAGE] * self.sizes.spare)
            self.target.write(slot, length, [GARBAGE] * nodes)
            if rng.random() < 0.01:
                sequence.finish_reason = "error"
                self.end(sequence, 0)
                self.seen["errors"] += 1
                continue
            count = rng.randrange(1, nodes + 1) if sequence.follows else 1
            tokens = [rng.randrange(3) for _ in range(count)]
            kept = [*sequence.ids, *tokens]
            self.target.write(slot, length, rows_for(kept, sequence.image_key, length, length + count))
            sequence.length += count
            sequence.pending += count if sequence.follows else 0
            self.emit(sequence, count, tokens)

    def catch_up(self, sequence: Sequence) -> None:
        start = sequence.length - sequence.pending
        values = drafter_rows(sequence.ids, sequence.image_key, start, sequence.length)
        self.drafter.write(sequence.slot, start, values + [GARBAGE] * (self.sizes.spare - len(values)))
        sequence.pending = 0

    def emit(self, sequence: Sequence, count: int, tokens: Many[int] = ()) -> None:
        for token in tokens or [self.random.randrange(3) for _ in range(count)]:
            sequence.append(token)
            if sequence.finish_reason is not None:
                self.end(sequence, min(sequence.length, len(sequence.ids)))
                self.seen["answers"] += 1
                return

    # What must hold

    def check(self, plan: Plan, before: dict[int, int]) -> None:
        scheduler = self.scheduler
        running, waiting = list(scheduler.running.values()), list(scheduler.waiting)
        assert {s.number for s in (*running, *waiting)} == set(self.alive), "somebody was lost"
        assert len(running) <= self.sizes.running
        assert [s.number for s in waiting] == sorted(s.number for s in waiting)
        if running and waiting:
            assert max(s.number for s in running) < waiting[0].number, "not first come, first served"
        if self.alive:
            oldest = min(self.alive.values(), key=lambda s: s.number)
            assert oldest in plan.decode or any(c.sequence is oldest for c in pieces(plan)), (
                "the oldest is kept waiting"
            )
        assert {s.slot for s in plan.decode} == {s.slot for s in running if s.decoding}
        assert all(s.slot < plan.bucket <= scheduler.slots for s in plan.decode)
        highest = max((s.slot for s in running), default=-1) + 1
        assert slot_bucket(highest) == slot_bucket(len(running)), "a batch larger than need be"
        self.check_admission(plan, running, waiting)
        for sequence in running:
            if sequence.number not in before:
                assert sequence.length == sequence.cached < len(sequence.ids)
                self.seen["hits"] += sequence.cached > 0
            self.check_rows(sequence.slot, sequence.ids, sequence.image_key, sequence.length, followed(sequence))
            if sequence.image_key and sequence.length:
                assert IMAGE not in sequence.ids[sequence.length :], "half an image"
                assert sequence.rope_delta == hash(sequence.image_key)
            assert len(sequence.ids) + self.sizes.spare <= self.target.length
        for slot, prefix in scheduler.left.items():
            self.check_rows(slot, prefix.ids.tolist(), prefix.image_key, len(prefix.ids), prefix.covered)

    def check_admission(self, plan: Plan, running: list[Sequence], waiting: list[Sequence]) -> None:
        images = [c for c in pieces(plan) if c.sequence.image_key]
        read = sum(c.count for c in pieces(plan))
        assert read <= self.sizes.chunk or images, "more is read than a step may"
        if waiting and len(running) < self.sizes.running and read < self.sizes.chunk:
            need = slot_length(max(len(s.ids) for s in (waiting[0], *running)) + self.sizes.spare)
            awaited = any(alike(waiting[0], c.sequence) for c in pieces(plan))
            assert awaited or self.sizes.rows // need <= len(running), "there was room"

    def check_rows(self, slot: int, ids: Many[int], image: str, length: int, covered: int) -> None:
        """All of the target's rows are these tokens', and the drafter's as far as it has read."""
        assert self.target.rows[slot][:length] == rows_for(ids, image, 0, length)
        covered = min(covered, len(ids) - 1)  # a last token's row depends on one that is not known any more
        assert self.drafter.rows[slot][:covered] == drafter_rows(ids, image, 0, covered)


def pieces(plan: Plan) -> list[Chunk]:
    return [chunk for group in plan.groups for chunk in group]


def alike(one: Sequence, other: Sequence) -> bool:
    return not one.image_key and not other.image_key and one.ids[:SHARED_AT_LEAST] == other.ids[:SHARED_AT_LEAST]


def followed(sequence: Sequence) -> int:
    return sequence.length - sequence.pending if sequence.follows else 0


SIZES = {
    "room for one": Sizes(rows=129),
    "room for one and a bit": Sizes(rows=200, chunk=7),
    "short of memory": Sizes(rows=300, running=5, images=0.3),
    "plenty": Sizes(rows=2000, running=6, images=0.0),
    "one at a time": Sizes(rows=500, running=1),
    "many": Sizes(rows=1200, running=17, chunk=200),
    "long drafts": Sizes(rows=500, spare=28, running=7, chunk=60),
    "never drafted for": Sizes(rows=400, followed=0.0),
    "always drafted for": Sizes(rows=300, followed=1.0, running=4),
}


def simulate(sizes: Sizes, seed: int, steps: int) -> Model:
    model = Model(sizes, seed)
    rng = model.random
    for number in range(steps):
        busy = number // 40 % 3  # quiet, lively, crowded
        for _ in range(rng.choice([0, 0, 1][: busy + 1] + [0, 1, 3][:busy])):
            model.arrive()
        if model.alive and rng.random() < 0.03:
            model.abort()
        model.step()
    left = sum(len(s.ids) + s.room for s in model.alive.values())
    for _ in range(left + 2 * len(model.alive)):
        if not model.scheduler.idle:
            model.step()
    assert model.scheduler.idle and not model.alive, "somebody starves"
    return model


@pytest.mark.parametrize("name", SIZES)
def test_every_slot_holds_what_it_should(name):
    seen: Counter[str] = Counter()
    for seed in range(4):
        seen += simulate(SIZES[name], seed, 400).seen
    assert min(seen[what] for what in ("answers", "aborts", "errors", "hits", "Layout")) > 5
    assert seen["Copy"] > 5 or name in ("room for one", "one at a time")
    assert seen["groups"] > 5 or name not in ("short of memory", "plenty", "long drafts", "never drafted for")
    if name in ("room for one and a bit", "short of memory", "always drafted for"):
        assert seen["preemptions"] > 2


@settings(max_examples=100, deadline=None)
@given(
    st.builds(
        Sizes,
        rows=st.integers(129, 900),
        spare=st.integers(2, 28),
        running=st.integers(1, 9),
        chunk=st.integers(1, 64),
        followed=st.sampled_from([0.0, 0.5, 1.0]),
        images=st.sampled_from([0.0, 0.5]),
    ),
    st.integers(0, 1 << 30),
)
def test_whatever_the_sizes(sizes, seed):
    simulate(sizes, seed, 60)


# Single decisions


def arrived(scheduler: Scheduler, number: int, ids: Many[int], answer: int = 8) -> Sequence:
    request = Request(str(number), ids, SamplingParams(max_tokens=answer))
    sequence = Sequence(request, number, 1000, (), None, None)
    scheduler.add(sequence)
    return sequence


def read(plan: Plan) -> None:
    for chunk in pieces(plan):
        chunk.sequence.length += chunk.count
        if chunk.sequence.length == len(chunk.sequence.ids):
            chunk.sequence.append(7)
            chunk.sequence.decoding = True


def test_a_long_prompt_is_read_in_pieces_and_shares_the_step():
    scheduler = Scheduler(2000, 8, 3, 10)
    long, short = arrived(scheduler, 0, [1] * 25), arrived(scheduler, 1, [2] * 3)
    for expected in ([(long, 10)], [(long, 10)], [(long, 5), (short, 3)], []):
        plan = scheduler.schedule()
        assert [(c.sequence, c.count) for c in pieces(plan)] == expected
        read(plan)
    assert plan.decode == (long, short) and plan.bucket == 2


def groups(scheduler: Scheduler) -> list[list[tuple[int, int]]]:
    """The next step's, as number and count."""
    plan = scheduler.schedule()
    found = [[(c.sequence.number, c.count) for c in group] for group in plan.groups]
    read(plan)
    return found


def test_neighbours_are_read_together_while_padding_is_cheaper_than_a_pass():
    scheduler = Scheduler(4000, 8, 8, 250)
    for number, length in enumerate([10, 12, 9, 41, 43, 20, 90, 61]):
        arrived(scheduler, number, [number] * length)
    assert groups(scheduler) == [[(0, 10), (1, 12), (2, 9)], [(3, 41), (4, 43), (5, 20)], [(6, 90)], [(7, 25)]]
    assert groups(scheduler) == [[(7, 36)]]
    scheduler.finish(scheduler.running[2], 0)
    scheduler.finish(scheduler.running[4], 0)
    arrived(scheduler, 8, [8] * 10)
    arrived(scheduler, 9, [9] * 10)
    assert groups(scheduler) == [[(8, 10)], [(9, 10)]], "somebody decodes between them"


def test_padding_stays_within_the_slot():
    """The second one is padded by eleven tokens, and rows that are looked at end one before the slot does."""
    for length, together in ((30, True), (53, True), (54, False)):
        scheduler = Scheduler(500, 8, 3, 200)
        for number in range(2):
            arrived(scheduler, number, [number] * length)
        scheduler.schedule()
        scheduler.running[0].length = length - 12
        scheduler.running[1].length = length - 1
        assert (scheduler.length, len(scheduler.schedule().groups)) == (65, 1 if together else 2)


def test_an_image_is_read_by_itself():
    scheduler = Scheduler(4000, 8, 8, 250)
    for number in range(5):
        arrived(scheduler, number, [number] * 20).image_key = "an image" if number == 2 else ""
    assert groups(scheduler) == [[(0, 20), (1, 20)], [(2, 20)], [(3, 20), (4, 20)]]


def test_a_beginning_that_is_being_read_is_waited_for():
    scheduler = Scheduler(4000, 8, 8, 100)
    for number, (shared, own) in enumerate([(40, 5), (40, 7), (15, 9), (0, 3), (60, 4)]):
        arrived(scheduler, number, [77] * shared + [number] * own)
    assert groups(scheduler) == [[(0, 45)]], "who came later does not overtake"
    assert groups(scheduler) == [[(1, 7), (2, 24), (3, 3), (4, 24)]]
    assert [s.cached for _, s in sorted(scheduler.running.items())] == [0, 40, 0, 0, 40]


def test_the_latest_is_put_back_when_others_grow():
    """Three fit as long as all are short."""
    scheduler = Scheduler(3 * 65, 8, 3, 100)
    sequences = [arrived(scheduler, number, [number] * 20, answer=60) for number in range(3)]
    read(scheduler.schedule())
    sequences[1].ids += [5] * 40
    sequences[1].output_ids += [5] * 40
    sequences[1].length += 40
    plan = scheduler.schedule()
    assert plan.moves == (Layout(1, 129, (1, 20)),) or scheduler.running.keys() == {0}
    assert scheduler.preemptions == 2 and list(scheduler.waiting) == sequences[1:]
    assert plan.decode == (sequences[0],) and not plan.groups
    sequences[0].finish_reason = "length"
    scheduler.finish(sequences[0], sequences[0].length)
    plan = scheduler.schedule()
    assert [(c.sequence, c.count) for c in pieces(plan)] == [(sequences[1], 61)], "put back: first, with its answer"


def test_batches_shrink_when_the_lower_slots_fall_free():
    scheduler = Scheduler(2000, 8, 5, 100)
    sequences = [arrived(scheduler, number, [number] * 5) for number in range(5)]
    read(scheduler.schedule())
    for sequence in (sequences[0], sequences[2], sequences[3]):
        sequence.finish_reason = "length"
        scheduler.finish(sequence, sequence.length)
    plan = scheduler.schedule()
    assert plan.moves == (Copy(4, 0, 5),) and plan.bucket == 2
    assert [(s.number, s.slot) for s in plan.decode] == [(4, 0), (1, 1)]


def test_a_prefix_is_never_written_over_before_it_is_copied(monkeypatch):
    """Two prompts are let in at once, both continue what is in a higher slot, and no slot is empty."""
    assert moves_of_two() == (Copy(1, 0, 19), Copy(2, 1, 19))
    plant(monkeypatch, Scheduler, "_vacate", ".used >= prefix.used", ".used > prefix.used")
    assert moves_of_two() == (Copy(1, 0, 19), Copy(1, 2, 20), Copy(2, 1, 19)), "this test no longer sees the bug"


def moves_of_two() -> tuple[Layout | Copy, ...]:
    scheduler = with_left({0: prefix([0] * 20), 1: prefix([1] * 20), 2: prefix([2] * 20, used=2)})
    arrived(scheduler, 3, [1] * 20)
    arrived(scheduler, 4, [2] * 20)
    return scheduler.schedule().moves


def with_left(left: dict[int, Prefix]) -> Scheduler:
    """A scheduler of three slots of 65 rows, in which others have left their rows."""
    scheduler = Scheduler(3 * 65, 8, 3, 100)
    scheduler.slots, scheduler.length, scheduler.left, scheduler._clock = 3, 65, left, 3
    return scheduler


def prefix(ids: Many[int], *, image: str = "", unsplit: int = 0, used: int = 1) -> Prefix:
    return Prefix(np.array(ids, dtype=np.int32), 0, image, unsplit, 0, used)


def test_idle_rows_take_the_end_of_a_prefix_only():
    scheduler = with_left({0: prefix([1] * 60), 1: prefix([1] * 30), 2: prefix([1] * 60, image="a", unsplit=57)})
    assert scheduler.starts(3, 8) == [56, 30, 56]
    assert {slot: len(p.ids) for slot, p in scheduler.left.items()} == {0: 56, 1: 30}


@pytest.mark.parametrize(
    ("image", "common", "shared"), [("a", 40, 40), ("a", 39, 0), ("b", 40, 0), ("", 40, 0)], ids=str
)
def test_half_an_image_is_of_no_use(image, common, shared):
    scheduler = with_left({0: prefix([1] * 42, image="a", unsplit=40)})
    sequence = arrived(scheduler, 0, [1] * common + [2] * 9)
    sequence.image_key = image
    scheduler.schedule()
    assert sequence.cached == sequence.length == shared


def test_a_request_that_waits_can_be_taken_out():
    scheduler = Scheduler(65, 8, 1, 100)
    first, second = arrived(scheduler, 0, [1] * 9), arrived(scheduler, 1, [1] * 9)
    scheduler.schedule()
    assert scheduler.find("1") is second and scheduler.find("2") is None
    scheduler.finish(second, 0)
    assert scheduler.find("1") is None and scheduler.find("0") is first and not scheduler.idle
    scheduler.finish(first, 0)
    assert scheduler.idle and not scheduler.left
    scheduler.check()


@given(st.integers(1, 100_000))
def test_length_buckets(rows):
    bucket = length_bucket(rows)
    assert rows <= bucket < rows + max(64, rows // 4) and bucket % 64 == 0
    assert length_bucket(bucket) == bucket and length_bucket(rows + 1) >= bucket


@given(st.integers(1, 2000))
def test_slot_buckets(count):
    bucket = slot_bucket(count)
    assert count <= bucket < 2 * count + (count == 1) + 64 and slot_bucket(bucket) == bucket
    assert bucket in BATCHES or bucket > BATCHES[-1]


BUGS = {
    "moved over what was there": (Scheduler, "_move", "self._vacate(dest)", "pass"),
    "no place is made for the one that moves": (
        Scheduler, "_move", "self._vacate(dest)",
        "del self.running[source]; self._vacate(dest); self.running[source] = 0",
    ),
    "idle rows write prefixes": (Scheduler, "starts", "found.append(min(len(prefix.ids), most))", "found.append(0)"),
    "images like any text": (Scheduler, "_shared", "if prefix.image_key == sequence.image_key", "if True"),
    "the last token is not read": (module, "usable", "min(shared, total - 1)", "shared"),
    "the drafter's row for a token that did not follow": (module, "usable", "shared - 1, covered", "shared, covered"),
    "more than the drafter has read": (module, "usable", "shared - 1, covered", "shared - 1"),
    "padded beyond the slot": (Scheduler, "_together", "and max(c.start", "or max(c.start"),
    "not only neighbours": (Scheduler, "_together", "chunk.sequence.slot != last.slot + 1 or", ""),
    "images in company": (Scheduler, "_together", "or chunk.sequence.image_key or last.image_key", ""),
    "the first is put back": (Scheduler, "_grow", "max(self.running", "min(self.running"),
    "no order": (Scheduler, "_preempt", "insort(self.waiting, sequence, key=lambda s: s.number)",
                 "self.waiting.append(sequence)"),
    "slots that are not there": (Scheduler, "_lay_out", "if slot >= slots):", "if slot > slots):"),
    "slots too short": (Scheduler, "_need", "+ self.spare", ""),
    "nobody moves down": (Scheduler, "_compact", "<= slot_bucket(len(self.running))", ">= 0"),
    "a slot is lost": (Scheduler, "_leave", "del self.running[slot]", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_these_tests_see(bug, monkeypatch):
    plant(monkeypatch, *BUGS[bug])
    with pytest.raises((AssertionError, IndexError, KeyError, AttributeError, StopIteration, ValueError)):
        for seed in range(6):
            for sizes in SIZES.values():
                simulate(sizes, seed, 200)
