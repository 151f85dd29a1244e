"""One HTTP response in the making: what the answers to a request have come to, at once or chunk by chunk."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from eyas.core import Request, SamplingParams
from eyas.engine.stats import AcceptanceStats
from eyas.server.prompts import Prompt
from eyas.server.protocol import ChatRequest, CompletionRequest, StreamOptions

if TYPE_CHECKING:
    from eyas.engine.sequence import Emitted, FinishReason, Output


@dataclass
class Choice:
    index: int
    prompt: Prompt
    text: str = ""
    tokens: list[Emitted] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    begun: bool = False  # something of it was sent
    cached_tokens: int = 0
    offset: int = 0  # characters of text that came with the tokens whose log-probabilities were reported


class Answers(ABC):
    """The n answers to each prompt, in OpenAI's order: all of the first prompt, all of the second."""

    prefix: str
    object: str
    chunk_object: str

    def __init__(self, asked: ChatRequest | CompletionRequest, prompts: Sequence[Prompt], model: str, tokenizer: Any):
        self.asked, self.prompts, self.tokenizer = asked, prompts, tokenizer
        self.choices = [Choice(number, prompts[number // asked.n]) for number in range(len(prompts) * asked.n)]
        self.stats = AcceptanceStats()
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._options = asked.stream_options or StreamOptions()

    def requests(self, samplings: Sequence[SamplingParams]) -> list[Request]:
        """For the engine, given each prompt's settings. The n-th answer has the seed's n-th successor, as in vLLM."""
        n = self.asked.n
        made = []
        for choice in self.choices:
            sampling = samplings[choice.index // n]
            sampling = replace(sampling, seed=sampling.seed + choice.index % n)
            ids, images = choice.prompt.ids, choice.prompt.images
            speculate = self.asked.speculation != "off"
            made.append(Request(f"{self.id}-{choice.index}", ids, sampling, images=images, speculate=speculate))
        return made

    def take(self, number: int, output: Output) -> Choice:
        choice = self.choices[number]
        choice.text += output.text
        choice.tokens += output.emitted
        choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
        choice.cached_tokens = output.cached_tokens
        if output.stats is not None:
            self.stats.add(output.stats)
        return choice

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": choice.index,
                **self.content(choice),
                "logprobs": self.logprobs(choice, choice.tokens) if self.reports else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": self._stop_reason(choice),
                **self._details(choice.tokens),
            }
            for choice in self.choices
        ]
        made = {**self._head, "object": self.object, "choices": choices, "usage": self.usage()}
        return self.with_prompt_ids(made, self.choices)

    def chunks(self, number: int, output: Output) -> list[dict[str, Any]]:
        """What one output is to whoever reads the stream; nothing, as long as no text is certain."""
        choice = self.take(number, output)
        made, details = [], self._details(output.emitted)
        if not choice.begun and (opening := self.opening()):
            made.append(self._chunk(choice, opening, None))
        told = {
            "logprobs": self.logprobs(choice, output.emitted) if self.reports else None,
            "finish_reason": output.finish_reason,
            "stop_reason": self._stop_reason(choice),
            **details,
        }
        if output.text or output.finish_reason or self.reports or details:
            made.append(self._chunk(choice, self.delta(output.text), told))
        if made and not choice.begun:
            made[0] = self.with_prompt_ids(made[0], [choice])
            choice.begun = True
        return made

    def last_chunk(self) -> dict[str, Any] | None:
        if not self._options.include_usage:
            return None
        return {**self._head, "object": self.chunk_object, "choices": [], "usage": self.usage()}

    def _chunk(self, choice: Choice, content: dict[str, Any], told: dict[str, Any] | None) -> dict[str, Any]:
        told = told or {"logprobs": None, "finish_reason": None, "stop_reason": None}
        chunk = {**self._head, "object": self.chunk_object, "choices": [{"index": choice.index, **content, **told}]}
        if self._options.include_usage:
            chunk["usage"] = self.usage() if self._options.continuous_usage_stats else None
        return chunk

    def usage(self) -> dict[str, Any]:
        """``speculative`` counts answers that are finished; ``accepted`` excludes bonus tokens."""
        prompt_tokens = sum(len(prompt.ids) for prompt in self.prompts)
        completion_tokens = sum(len(choice.tokens) for choice in self.choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "speculative": {
                "steps": self.stats.steps,
                "drafted": self.stats.drafted,
                "accepted": sum(self.stats.accepted),
                "acceptance_length": self.stats.acceptance_length,
            },
        }

    @property
    def cached_tokens(self) -> int:
        """Of the prompts: what the first answer to each found in memory, the others finding that it is there."""
        return sum(choice.cached_tokens for choice in self.choices[:: self.asked.n])

    @property
    def reports(self) -> bool:
        """Whether log-probabilities are wanted: 0 of them are the emitted tokens' own."""
        return self.asked.logprobs is not None and self.asked.logprobs is not False

    def _stop_reason(self, choice: Choice) -> int | str | None:
        """The stop string or the token that ended an answer, as in vLLM; None for the tokenizer's own end."""
        own = choice.stop_reason == self.tokenizer.eos_token_id and not self.asked.ignore_eos
        return None if own else choice.stop_reason

    def _details(self, tokens: Sequence[Emitted]) -> dict[str, Any]:
        """One entry for each token: a chunk's are those of one step."""
        told: dict[str, Any] = {"token_ids": [t.token_id for t in tokens]} if self.asked.return_token_ids else {}
        if self.asked.return_draft_positions:
            told |= {"draft_positions": draft_positions(tokens), "token_texts": [token.text for token in tokens]}
        return told

    # What the endpoints differ in

    @abstractmethod
    def content(self, choice: Choice) -> dict[str, Any]: ...

    @abstractmethod
    def delta(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def opening(self) -> dict[str, Any] | None:
        """What is sent before the first token."""

    @abstractmethod
    def logprobs(self, choice: Choice, tokens: Sequence[Emitted]) -> dict[str, Any]: ...

    @abstractmethod
    def with_prompt_ids(self, made: dict[str, Any], choices: Sequence[Choice]) -> dict[str, Any]:
        """``made`` with the prompts' token ids, where these were asked for."""


def draft_positions(tokens: Sequence[Emitted]) -> list[int]:
    """The place each token had in its draft, from 1 on; 0 for the target's own, one of which ends every step."""
    positions: list[int] = []
    for token in tokens:
        positions.append((positions[-1] if positions else 0) + 1 if token.drafted else 0)
    return positions
