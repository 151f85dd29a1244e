"""One request while it runs: the only place that knows how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from eyas.core import EyasError, Request, SamplingParams
from eyas.engine.stats import AcceptanceStats
from eyas.engine.text import TextStream
from eyas.speculation.sampling import TokenHistory

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Emitted:
    """One token of the answer. ``text`` is what became certain with it, which may be nothing yet."""

    token_id: int
    text: str
    drafted: bool  # it was an accepted draft token, not the target's own
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """What one engine step did for one request."""

    request_id: str
    emitted: tuple[Emitted, ...]
    finish_reason: FinishReason | None = None
    tail: str = ""  # text that became certain only because the answer ended
    error: EyasError | None = None
    stats: AcceptanceStats | None = None  # with the last output

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.emitted) + self.tail


@dataclass
class Sequence:
    """A request's tokens and where its keys and values are. ``length`` counts those in the target's cache."""

    request: Request
    slot: int
    limit: int  # prompt and answer together may not be longer
    stop_ids: tuple[int, ...]  # tokens that end the answer
    text: TextStream | None
    history: TokenHistory | None
    length: int = 0
    rope_delta: int = 0
    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def last_token(self) -> int:
        return self.output_ids[-1]

    @property
    def output_index(self) -> int:
        return len(self.output_ids)

    def append(self, token: int) -> str:
        """Takes one more token of the answer, decides whether the answer ends with it, and returns its text."""
        self.output_ids.append(token)
        if self.history is not None:
            self.history = self.history.with_output([token])
        enough = len(self.output_ids) >= self.sampling.min_tokens
        stopped, text = enough and token in self.stop_ids, ""
        if self.text is not None and not stopped:  # a token that ends the answer is no part of its text
            text = self.text.push(token, may_stop=enough)
            stopped = enough and self.text.stopped
        if stopped:
            self.finish_reason = "stop"
        elif self.room <= 0:
            self.finish_reason = "length"
        return text

    @property
    def room(self) -> int:
        """How many more tokens the answer may have."""
        made = len(self.output_ids)
        return min(self.sampling.max_tokens - made, self.limit - len(self.request.prompt_ids) - made)
