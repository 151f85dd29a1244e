"""One request while it is being answered: the only place that knows how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from eyas.core import EyasError, Request, SamplingParams
from eyas.engine.grammar import Grammar
from eyas.engine.stats import AcceptanceStats
from eyas.engine.text import TextStream
from eyas.speculation.sampling import TokenHistory

FinishReason = Literal["stop", "length", "abort", "error"]


class Emitted(NamedTuple):  # these two are made for every token of every sequence: tuples are made fastest
    """One token of the answer. ``text`` is what became certain with it, which may be nothing yet."""

    token_id: int
    text: str
    drafted: bool  # it was an accepted draft token, not the target's own
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Output(NamedTuple):
    """What one engine step did for one request."""

    request_id: str
    emitted: tuple[Emitted, ...]
    finish_reason: FinishReason | None = None
    tail: str = ""  # text that became certain only because the answer ended
    error: EyasError | None = None
    stats: AcceptanceStats | None = None  # with the last output
    cached_tokens: int = 0  # with the last output: tokens of the prompt that were there already
    stop_reason: int | str | None = None  # with the last output: the token or stop string that ended it, if one did

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.emitted) + self.tail


@dataclass(eq=False)
class Sequence:
    """A request's tokens, and how many of them target and drafter have read.

    ``ids`` are prompt and answer. The target's cache holds the first ``length`` of them: all, while the prompt is read;
    all but the last one, the root of the next draft, while the answer is made.
    """

    request: Request
    number: int  # in order of arrival
    limit: int  # prompt and answer together may not be longer
    stop_ids: tuple[int, ...]  # tokens that end the answer
    text: TextStream | None
    history: TokenHistory | None
    grammar: Grammar | None = None  # behind the answer so far, where that is constrained
    image_key: str = ""  # what its images are, where it has any
    ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    slot: int = -1  # -1: waiting
    decoding: bool = False  # the prompt is read
    length: int = 0
    follows: bool = False  # the drafter has read, or can catch up with, all that the target has
    pending: int = 0  # of ``length``, how many the drafter has yet to read
    rope_delta: int = 0
    cached: int = 0  # tokens of the prompt that were there already
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)

    def __post_init__(self) -> None:
        self.output_ids = list(self.request.output_ids)
        self.ids = [*self.request.prompt_ids, *self.output_ids]
        self.sampling: SamplingParams = self.request.sampling
        self._end = min(len(self.request.prompt_ids) + self.sampling.max_tokens, self.limit)

    @property
    def output_index(self) -> int:
        return len(self.output_ids)

    def give_up(self) -> None:
        """From now on plainly: the drafter does not follow any more."""
        self.follows, self.pending = False, 0

    def leave(self) -> None:
        """Out of its slot: whatever is read again starts from nothing."""
        self.slot, self.length, self.pending, self.rope_delta = -1, 0, 0, 0
        self.follows = self.decoding = False

    def append(self, token: int) -> str:
        """Takes one more token of the answer, decides whether the answer ends with it, and returns its text.

        Raises RequestError where a constraint can be followed no further.
        """
        self.ids.append(token)
        self.output_ids.append(token)
        if self.history is not None:
            self.history = self.history.with_output([token])
        complete = self.grammar is not None and self.grammar.accept(token)
        enough = len(self.output_ids) >= self.sampling.min_tokens
        text = ""
        if (enough or complete) and token in self.stop_ids:
            self.stop_reason = token
        elif self.text is not None:  # a token that ends the answer is no part of its text
            text = self.text.push(token, may_stop=enough)
            self.stop_reason = self.text.stopped
        if self.stop_reason is not None or complete:  # of a constraint nothing may follow, min_tokens or not
            self.finish_reason = "stop"
        elif len(self.ids) >= self._end:
            self.finish_reason = "length"
        return text

    def flush(self) -> str:
        """The end of the text, which may hold a stop string that nothing had been certain of."""
        if self.text is None:
            return ""
        tail = self.text.flush()
        if self.text.stopped is not None and self.finish_reason == "length":
            self.finish_reason, self.stop_reason = "stop", self.text.stopped
        return tail

    @property
    def given(self) -> int:
        """Tokens that came with the request."""
        return len(self.request.prompt_ids) + len(self.request.output_ids)

    @property
    def room(self) -> int:
        """How many more tokens the answer may have."""
        return self._end - len(self.ids)
