"""Who runs in the next step, and where. It knows requests, slots and rows, never tensors."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from eyas.engine.sequence import Sequence

SHARED_AT_LEAST = 16  # a shorter common beginning is not worth a copy
PASS = 32  # at most so many tokens of padding are cheaper than another pass over all weights, on a CPU
PREFIX_SLOTS = 8  # beyond those that can run, for prefixes
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class Layout:
    """Both caches change to so many slots of so many rows; what fits stays."""

    slots: int
    length: int
    used: tuple[int, int]  # of which slots and rows that matters: the first so many of each


@dataclass(frozen=True)
class Copy:
    """The first rows of a slot, and all else that belongs to its sequence, are wanted in another one too."""

    source: int
    dest: int
    rows: int


@dataclass(frozen=True)
class Chunk:
    """A piece of a sequence to read: ``count`` tokens behind those it has."""

    sequence: Sequence
    count: int

    @property
    def start(self) -> int:
        """The place of its first token, as long as it is not read."""
        return self.sequence.length

    @property
    def end(self) -> int:
        return self.sequence.length + self.count


@dataclass(frozen=True)
class Plan:
    """One step: first the caches are arranged, then pieces of prompts are read, then all others go on by one draft."""

    moves: tuple[Layout | Copy, ...]
    groups: tuple[tuple[Chunk, ...], ...]  # of neighbours: those of one group are read in one pass
    decode: tuple[Sequence, ...]
    bucket: int  # slots 0 .. bucket - 1 hold all of ``decode``
    length: int  # rows of a slot that are looked at


@dataclass
class Prefix:
    """What is left of a sequence in a slot that is free: the beginning of another one, maybe."""

    ids: np.ndarray  # int32, as many as there are rows
    covered: int  # of these rows, how many the drafter has read
    image_key: str
    unsplit: int  # fewer common tokens than this are of no use: an image is among them
    rope_delta: int
    used: int  # when it was left or last of use


class Scheduler:
    """First come, first served, as many at once as have room.

    Memory is ``rows`` tokens, divided into slots as long as the longest sequence needs. Sequences that no longer fit
    when others grow are put back, the latest first, and read again later: nothing fails for want of memory as long as
    the oldest one fits alone. Finished sequences leave their rows behind for prompts that begin alike.
    """

    def __init__(
        self,
        rows: int,
        spare: int,
        max_running: int,
        chunk: int,
        follow: Callable[[], bool] = lambda: False,
        prefix_caching: bool = True,
    ):
        """``rows`` must hold the longest sequence, and ``spare`` rows behind it for drafts (``slot_length``).

        ``chunk`` tokens of prompts are read in a step. ``follow`` says whether the drafter shall read a new prompt.
        """
        self.rows, self.spare, self.max_running, self.chunk, self.follow = rows, spare, max_running, chunk, follow
        self.padding = max(PASS, chunk // 8)  # on a GPU, where a step reads more, another pass is dearer too
        self.prefix_caching = prefix_caching
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}  # by slot
        self.left: dict[int, Prefix] = {}  # by slot
        self.slots, self.length = 0, 0
        self.preemptions = 0
        self._moves: list[Layout | Copy] = []
        self._clock = 0

    # What the engine asks

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> Plan:
        """Makes room, lets in whom there is room for, and says what this step does."""
        self._clock += 1
        self._moves = []
        self._grow()
        chunks = self._chunks()
        self._compact()
        decode = tuple(s for _, s in sorted(self.running.items()) if s.decoding)
        bucket = min(slot_bucket(decode[-1].slot + 1), self.slots) if decode else 0
        return Plan(tuple(self._moves), self._groups(chunks), decode, bucket, self._looked_at(bucket))

    @property
    def readable(self) -> int:
        """Rows of a slot that may be looked at."""
        return self.length - 1

    def _looked_at(self, bucket: int) -> int:
        """Rows that a step must read: slots may be longer, for a sequence that is not in it any more."""
        held = [len(s.ids) for s in self.running.values() if s.slot < bucket]
        held += [len(prefix.ids) for slot, prefix in self.left.items() if slot < bucket]
        return min(length_bucket(max(held, default=0) + self.spare), self.readable)

    def starts(self, bucket: int, behind: int) -> list[int]:
        """For slots 0 .. bucket - 1: rows that a step must not write, with room for ``behind`` rows that it may.

        What a prefix holds beyond that is given up.
        """
        most = self.readable - behind
        found = []
        for slot in range(bucket):
            if (sequence := self.running.get(slot)) is not None:
                found.append(sequence.length)
            elif (prefix := self.left.get(slot)) is not None:
                if len(prefix.ids) > most:
                    self._shorten(slot, most)
                found.append(min(len(prefix.ids), most))
            else:
                found.append(0)
        return found

    def finish(self, sequence: Sequence, rows: int) -> None:
        """Takes a sequence out. The first ``rows`` rows of its slot hold its first tokens; 0 if they are not sound."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence, rows)

    def forget(self) -> None:
        """Drops everything: all requests, and whatever was left in the slots."""
        self.waiting.clear()
        self.running.clear()
        self.left.clear()
        self.slots = self.length = 0  # so that whoever comes next has the caches laid out

    def find(self, request_id: str) -> Sequence | None:
        return next((s for s in (*self.waiting, *self.running.values()) if s.request.id == request_id), None)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def check(self) -> None:
        """Raises AssertionError when slots were lost or are held twice. Cheap enough for every step of a test."""
        assert not set(self.running) & set(self.left), "a slot is both in use and free"
        assert all(0 <= slot < self.slots for slot in (*self.running, *self.left)), "a slot that is not there"
        assert self.slots * self.length <= self.rows, "more rows than there are"
        for slot, sequence in self.running.items():
            assert sequence.slot == slot and sequence.finish_reason is None, "a finished sequence holds a slot"
            assert sequence.length <= len(sequence.ids) and len(sequence.ids) <= self.length, "rows beyond the slot"
            assert sequence.pending <= sequence.length
            assert not sequence.decoding or sequence.length == len(sequence.ids) - 1, "not exactly one token is ahead"
        assert all(s.slot < 0 and not s.length for s in self.waiting), "one that waits holds a slot"
        assert all(len(p.ids) <= self.length and p.covered <= len(p.ids) for p in self.left.values())

    # How rows are shared out

    def _need(self, sequences: Iterable[Sequence]) -> int:
        """How long the slots must be."""
        return slot_length(max(len(s.ids) for s in sequences) + self.spare)

    def _grow(self) -> None:
        """Longer slots where a sequence needs them, with the latest sequences put back until all fit."""
        while self.running:
            need = self._need(self.running.values())
            if need <= self.length:
                return
            if self.rows // need >= len(self.running):
                self._lay_out(need)
                return
            self._preempt(max(self.running.values(), key=lambda s: s.number))

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence, sequence.length)
        insort(self.waiting, sequence, key=lambda s: s.number)
        self.preemptions += 1

    def _leave(self, sequence: Sequence, rows: int) -> None:
        slot = sequence.slot
        del self.running[slot]
        unsplit = len(sequence.request.prompt_ids) if sequence.image_key else 0
        if self.prefix_caching and rows >= max(SHARED_AT_LEAST, unsplit):
            self.left[slot] = Prefix(
                ids=np.array(sequence.ids[:rows], dtype=np.int32),
                covered=sequence.length - sequence.pending if sequence.follows else 0,
                image_key=sequence.image_key,
                unsplit=unsplit,
                rope_delta=sequence.rope_delta,
                used=self._clock,
            )
        sequence.leave()

    def _lay_out(self, length: int) -> None:
        """Slots of another length: sequences move down to slots that stay, prefixes that have no place are dropped."""
        slots = min(self.rows // length, self.max_running + PREFIX_SLOTS)
        for slot in sorted(slot for slot in self.running if slot >= slots):
            self._move(slot, next(free for free in range(slots) if free not in self.running))
        for slot in [slot for slot in self.left if slot >= slots]:
            del self.left[slot]
        for slot in list(self.left):
            self._shorten(slot, length)
        self.slots, self.length = slots, length
        held = [*(len(p.ids) for p in self.left.values()), *(s.length for s in self.running.values())]
        used = max((*self.left, *self.running), default=-1) + 1
        self._moves.append(Layout(slots, length, (used, max(held, default=0))))

    def _shorten(self, slot: int, rows: int) -> None:
        prefix = self.left[slot]
        prefix.ids, prefix.covered = prefix.ids[:rows], min(prefix.covered, rows)
        if len(prefix.ids) < max(prefix.unsplit, SHARED_AT_LEAST):
            del self.left[slot]

    def _compact(self) -> None:
        """Moves the highest sequence down while that makes the batch smaller."""
        while self.running:
            top = max(self.running)
            if slot_bucket(top + 1) <= slot_bucket(len(self.running)):
                return
            self._move(top, next(free for free in range(self.slots) if free not in self.running))

    def _move(self, source: int, dest: int) -> None:
        """A sequence goes to a free slot; a prefix that was there goes elsewhere, or is given up."""
        self._vacate(dest)  # while the sequence still holds its slot: nothing may be copied over it
        sequence = self.running.pop(source)
        self._moves.append(Copy(source, dest, max(sequence.length, 1)))
        sequence.slot = dest
        self.running[dest] = sequence

    def _vacate(self, slot: int) -> None:
        """Makes a free slot empty: its prefix moves to an empty one, or to where the least recently used one was."""
        if slot not in self.left:
            return
        prefix = self.left.pop(slot)
        empty = next((s for s in range(self.slots) if s not in self.running and s not in self.left and s != slot), None)
        if empty is None:
            oldest = min(self.left, key=lambda s: self.left[s].used, default=None)
            if oldest is None or self.left[oldest].used >= prefix.used:  # equal: about to be copied from, maybe
                return
            empty = oldest
        self.left[empty] = prefix
        self._moves.append(Copy(slot, empty, len(prefix.ids)))

    # Who is let in, and what is read

    def _chunks(self) -> list[Chunk]:
        budget, chunks = self.chunk, []
        for sequence in sorted(self.running.values(), key=lambda s: s.number):
            if not sequence.decoding and budget > 0:
                chunks.append(self._chunk(sequence, budget))
                budget -= chunks[-1].count
        while budget > 0 and self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            if self._being_read(sequence, chunks) or not self._admit(sequence):
                break
            self.waiting.popleft()
            chunks.append(self._chunk(sequence, budget))
            budget -= chunks[-1].count
        return chunks

    def _chunk(self, sequence: Sequence, budget: int) -> Chunk:
        left = len(sequence.ids) - sequence.length
        if sequence.image_key and sequence.length == 0:  # an image attends to all of itself: it is never split
            return Chunk(sequence, len(sequence.request.prompt_ids))
        return Chunk(sequence, min(left, budget))

    def _groups(self, chunks: Iterable[Chunk]) -> tuple[tuple[Chunk, ...], ...]:
        """What is read together, padded to the longest: neighbours, while that costs less than a pass of their own."""
        groups: list[list[Chunk]] = []
        for chunk in sorted(chunks, key=lambda c: c.sequence.slot):
            if groups and self._together(groups[-1], chunk):
                groups[-1].append(chunk)
            else:
                groups.append([chunk])
        return tuple(map(tuple, groups))

    def _together(self, group: list[Chunk], chunk: Chunk) -> bool:
        last = group[-1].sequence
        if chunk.sequence.slot != last.slot + 1 or chunk.sequence.image_key or last.image_key:
            return False
        width = max(c.count for c in group)
        wider = max(width, chunk.count)
        padding = len(group) * (wider - width) + wider - chunk.count
        return padding <= self.padding and max(c.start for c in (*group, chunk)) + wider <= self.readable

    def _being_read(self, sequence: Sequence, chunks: Iterable[Chunk]) -> bool:
        """Whether the next step finds a longer beginning of it than there is now: then it need not be read twice."""
        start = sequence.ids[:SHARED_AT_LEAST]
        alike = [c for c in chunks if c.sequence.ids[:SHARED_AT_LEAST] == start and not c.sequence.image_key]
        if not alike or not self.prefix_caching or sequence.image_key:
            return False
        ids = np.array(sequence.ids, dtype=np.int32)
        soon = max(common(ids, np.array(c.sequence.ids[: c.end], dtype=np.int32)) for c in alike)
        return soon - self._shared(sequence)[1] >= SHARED_AT_LEAST

    def _admit(self, sequence: Sequence) -> bool:
        need = self._need((sequence, *self.running.values()))
        if self.rows // need <= len(self.running):
            return False
        if need > self.length or self.slots <= len(self.running):
            self._lay_out(need)
        sequence.follows = sequence.request.speculate and self.follow()
        source, shared = self._shared(sequence) if self.prefix_caching else (-1, 0)
        dest = source if source in self.left else -1
        if dest < 0 or slot_bucket(dest + 1) > slot_bucket(len(self.running) + 1):
            dest = next(free for free in range(self.slots) if free not in self.running)
        if shared and source == dest:
            del self.left[dest]
        else:
            self._vacate(dest)  # never to where the beginning is: that was used last
            if shared:
                self._moves.append(Copy(source, dest, shared))
        sequence.slot, sequence.length, sequence.cached = dest, shared, shared
        self.running[dest] = sequence
        return True

    def _shared(self, sequence: Sequence) -> tuple[int, int]:
        """The slot with the longest common beginning, and how many rows of it are of use; (-1, 0) for none."""
        ids = np.array(sequence.ids, dtype=np.int32)
        best, shared = -1, 0
        for slot, prefix in self.left.items():
            if prefix.image_key == sequence.image_key:
                rows = usable(common(ids, prefix.ids), len(ids), prefix.covered, sequence.follows)
                if rows >= max(SHARED_AT_LEAST, prefix.unsplit) and rows > shared:
                    best, shared = slot, rows
        for slot, other in self.running.items():
            if not other.image_key and not sequence.image_key:
                if other.ids[:SHARED_AT_LEAST] != sequence.ids[:SHARED_AT_LEAST]:
                    continue
                theirs = np.array(other.ids[: other.length], dtype=np.int32)
                covered = other.length - other.pending if other.follows else 0
                rows = usable(common(ids, theirs), len(ids), covered, sequence.follows)
                if rows >= SHARED_AT_LEAST and rows > shared:
                    best, shared = slot, rows
        if best in self.left:
            self.left[best].used = self._clock
            sequence.rope_delta = self.left[best].rope_delta
        return best, shared


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences begin with alike."""
    count = min(len(a), len(b))
    differ = a[:count] != b[:count]
    return int(differ.argmax()) if differ.any() else count


def usable(shared: int, total: int, covered: int, follows: bool) -> int:
    """Rows of a common beginning that need not be computed again: the last token's logits are always needed.

    The drafter pairs each state with the token behind it, so its row for the last common token is another's.
    """
    rows = min(shared, total - 1)
    return min(rows, shared - 1, covered) if follows else rows


def slot_bucket(count: int) -> int:
    """Batch sizes that steps are run with: few, so that compiled code exists for them."""
    return BATCHES[bisect_left(BATCHES, count)] if count <= BATCHES[-1] else -(-count // 64) * 64


def length_bucket(rows: int) -> int:
    """Slot lengths: steps of an eighth, at least 64, so that little is read in vain and slots seldom change."""
    step = max(64, 1 << max(0, rows.bit_length() - 4))
    return -(-rows // step) * step


def slot_length(rows: int) -> int:
    """How long slots are for so many rows: always longer than what is looked at.

    Where both are equal torch takes them for one number, and compiled code would be for that case or the other only.
    """
    return length_bucket(rows) + 1
