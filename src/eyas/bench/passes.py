"""What is measured: a side answers one load once, which is a pass; the passes of both sides make a pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from eyas.bridges.metrics import Speculation
from eyas.core import EyasError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Name = Literal["without", "with"]
SIDES: tuple[Name, Name] = ("without", "with")
PARTS = ("draft", "target", "rest")  # of a step, where an engine can be looked into
STEPS = "steps"


class BenchError(EyasError):
    """A benchmark cannot go on, or there is nothing to judge."""


@dataclass(frozen=True)
class Level:
    """How much is asked at once: requests kept running, or requests a second that arrive at random (Poisson)."""

    kind: Literal["concurrency", "request rate"]
    value: float

    def __str__(self) -> str:
        return f"{self.kind} {self.value:g}"


@dataclass(frozen=True)
class Answer:
    """One request. Seconds, from when it was sent; ``start`` is when that was, from the beginning of the pass."""

    key: str  # the prompt's
    start: float = 0.0
    first: float | None = None  # until the first token; None: not streamed
    total: float = 0.0  # until the last one
    gaps: tuple[float, ...] = ()  # between pieces, each of which may be several tokens
    tokens: int = 0
    prompt_tokens: int | None = None
    text: str = ""
    finish: str = ""
    error: str = ""  # why it failed, empty if it did not
    lost: bool = False  # because of the connection: nobody may be there any more
    ids: tuple[int, ...] = ()  # the tokens, where they are known
    pieces: tuple[tuple[str, bool], ...] = ()  # text in runs of drafted tokens and others, where that is known
    said: Mapping[str, Any] = field(default_factory=dict, compare=False)  # what the server said about its drafts

    @property
    def per_token(self) -> float | None:
        """Seconds for each token after the first."""
        return (self.total - self.first) / (self.tokens - 1) if self.first is not None and self.tokens > 1 else None


@dataclass(frozen=True)
class Pass:
    """``running``: requests at a time, on average."""

    turn: int  # the round, from 0
    level: Level
    task: str
    side: Name
    seconds: float
    answers: tuple[Answer, ...]
    running: float = 0.0
    speculation: Speculation | None = None
    notes: tuple[str, ...] = ()
    spent: Mapping[str, float] = field(default_factory=dict)  # seconds of all steps by part, and their number: STEPS

    @property
    def good(self) -> list[Answer]:
        return [answer for answer in self.answers if not answer.error]

    @property
    def failed(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error]

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.good)

    @property
    def busy(self) -> float:
        """Seconds that it would take to speed up tokens: all there were, or at a rate of arrival, which no speed
        changes, those that the users waited.
        """
        if self.level.kind == "concurrency":
            return self.seconds
        return sum(answer.total for answer in self.good)

    def as_record(self) -> dict[str, Any]:
        answers = [
            {n: v for n, v in vars(answer).items() if n != "said" and v != getattr(Answer, n, None)}
            for answer in self.answers
        ]
        known = vars(self.speculation) if self.speculation else None
        return vars(self) | {"level": vars(self.level), "answers": answers, "speculation": known}

    @staticmethod
    def from_record(record: Mapping[str, Any]) -> Pass:
        return _reader().validate_python(record)


@cache
def _reader() -> TypeAdapter[Pass]:
    from pydantic import TypeAdapter

    return TypeAdapter(Pass)


@dataclass(frozen=True)
class Pair:
    """Both sides on the same prompts, one right after the other. ``order`` says which one was first."""

    without: Pass
    with_: Pass
    order: tuple[Name, ...] = SIDES

    @property
    def turn(self) -> int:
        return self.without.turn

    @property
    def level(self) -> Level:
        return self.without.level

    @property
    def task(self) -> str:
        return self.without.task

    @property
    def sides(self) -> dict[Name, Pass]:
        return {"without": self.without, "with": self.with_}


def speed(passes: Sequence[Pass]) -> float:
    """Tokens a second of passes that belong together: the same level, round and side."""
    busy = sum(one.busy for one in passes)
    return sum(one.tokens for one in passes) / busy if busy > 0 else 0.0


@dataclass(frozen=True)
class Heard:
    """What is known of a pass beyond its answers."""

    speculation: Speculation | None = None  # None: nothing is
    notes: tuple[str, ...] = ()
    spent: Mapping[str, float] = field(default_factory=dict)
