"""Answers as /v1/completions spells them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eyas.server.answers import Answers, Choice
from eyas.server.logprobs import completion_logprobs

if TYPE_CHECKING:
    from eyas.engine.sequence import Emitted


class CompletionAnswers(Answers):
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def content(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.text}

    def delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def opening(self) -> None:
        return None

    def logprobs(self, choice: Choice, tokens: Sequence[Emitted]) -> dict[str, Any]:
        told, choice.offset = completion_logprobs(self.tokenizer, tokens, choice.offset)
        return told

    def with_prompt_ids(self, made: dict[str, Any], choices: Sequence[Choice]) -> dict[str, Any]:
        if self.asked.return_token_ids:
            for told, choice in zip(made["choices"], choices, strict=True):
                told["prompt_token_ids"] = choice.prompt.ids
        return made
