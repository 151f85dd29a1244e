"""Answers as /v1/chat/completions spells them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eyas.server.answers import Answers, Choice
from eyas.server.logprobs import chat_logprobs

if TYPE_CHECKING:
    from eyas.engine.sequence import Emitted


class ChatAnswers(Answers):
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def content(self, choice: Choice) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": choice.text, "refusal": None}}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def opening(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}}

    def logprobs(self, choice: Choice, tokens: Sequence[Emitted]) -> dict[str, Any]:
        return chat_logprobs(self.tokenizer, tokens)

    def with_prompt_ids(self, made: dict[str, Any], choices: Sequence[Choice]) -> dict[str, Any]:
        return {**made, "prompt_token_ids": self.prompts[0].ids} if self.asked.return_token_ids else made
