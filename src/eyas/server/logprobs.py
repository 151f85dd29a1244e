"""Log-probabilities in the shapes of the two endpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.engine.sequence import Emitted

LEAST = -9999.0  # stands for minus infinity, which JSON does not know


def chat_logprobs(tokenizer: Any, tokens: Iterable[Emitted]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_entry(tokenizer, token.token_id, token.logprob),
                "top_logprobs": [_entry(tokenizer, *pair) for pair in token.top_logprobs],
            }
            for token in tokens
        ]
    }


def completion_logprobs(tokenizer: Any, tokens: Iterable[Emitted], offset: int) -> tuple[dict[str, Any], int]:
    """``offset`` characters of the answer's text come before these tokens; returned is how many before the next."""
    names: list[str] = []
    values: list[float] = []
    top: list[dict[str, float]] = []
    offsets: list[int] = []
    for token in tokens:
        names.append(token_text(tokenizer, token.token_id))
        values.append(_finite(token.logprob))
        offsets.append(offset)
        offset += len(token.text)
        likely: dict[str, float] = {}
        for token_id, logprob in (*token.top_logprobs, (token.token_id, token.logprob)):
            likely.setdefault(token_text(tokenizer, token_id), _finite(logprob))  # of two that read alike the likelier
        top.append(likely)
    return {"tokens": names, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}, offset


def token_text(tokenizer: Any, token_id: int) -> str:
    """A token by itself: where it is a piece of a character, a replacement character."""
    return tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _entry(tokenizer: Any, token_id: int, logprob: float | None) -> dict[str, Any]:
    text = token_text(tokenizer, token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float | None) -> float:
    return LEAST if logprob is None else max(logprob, LEAST)
