"""Who runs in the next step. It knows requests and slots, never tensors."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from eyas.core import Request
from eyas.engine.sequence import Sequence


@dataclass(frozen=True)
class Batch:
    """One step's work: either prompts to read or running sequences to continue."""

    prefill: list[Request]
    decode: list[Sequence]


class Scheduler:
    """First come, first served, as many at once as there are slots; a free slot is filled before decoding goes on."""

    def __init__(self, slots: int):
        self.waiting: deque[Request] = deque()
        self.running: list[Sequence] = []
        self.free = list(range(slots))[::-1]

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> Batch:
        if self.waiting and self.free:
            return Batch([self.waiting.popleft()], [])
        return Batch([], list(self.running))

    def start(self, sequence: Sequence) -> None:
        self.running.append(sequence)

    def take_slot(self) -> int:
        return self.free.pop()

    def finish(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.free.append(sequence.slot)

    def knows(self, request_id: str) -> bool:
        return any(r.id == request_id for r in (*self.waiting, *(s.request for s in self.running)))

    def drop_waiting(self, request_id: str) -> None:
        self.waiting = deque(r for r in self.waiting if r.id != request_id)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running
