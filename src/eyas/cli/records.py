"""Answers and comparisons as JSON, one object a line."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from eyas.cli.printer import Listen, waiting
from eyas.core import Request

if TYPE_CHECKING:
    from eyas.engine.llm import Completion
    from eyas.engine.lossless import Comparison
    from eyas.engine.sequence import Emitted


def print_json(record: Any) -> None:
    print(json.dumps(finite(record), ensure_ascii=False, allow_nan=False), flush=True)


def finite(value: Any) -> Any:
    """JSON knows no infinity: null in its place."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JsonLines:
    def following(self, request: Request) -> AbstractContextManager[Listen]:
        return waiting(request)

    def answer(self, text: str, request: Request, completion: Completion) -> None:
        print_json({"prompt": text, "seed": request.sampling.seed} | answer_record(completion))

    def stopped(self, text: str, answer: str) -> None:
        print_json({"prompt": text, "text": answer, "finish_reason": "abort"})

    def comparison(self, place: tuple[int, int], text: str, comparison: Comparison) -> None:
        print_json(
            {"prompt": text}
            | answer_record(comparison.speculative)
            | {
                "plain": answer_record(comparison.plain),
                "equal": comparison.equal,
                "lossless": comparison.lossless,
                "divergences": [asdict(divergence) for divergence in comparison.divergences],
                "speedup": comparison.speedup,
            }
        )

    def total(self, texts: Sequence[str], comparisons: Sequence[Comparison]) -> None:
        """Every line stands for itself."""


def answer_record(completion: Completion) -> dict[str, Any]:
    stats = completion.stats
    record = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "tokens_per_second": completion.tokens_per_second,
        "acceptance_length": stats.acceptance_length,
        "acceptance_rates": stats.acceptance_rates,
        "steps": stats.steps,
        "drafted": stats.drafted,
        "first_token_seconds": completion.prefill_seconds,
        "seconds": completion.prefill_seconds + completion.decode_seconds,
    }
    if any(token.logprob is not None for token in completion.tokens):
        record["logprobs"] = [logprob_record(token) for token in completion.tokens]
    return record


def logprob_record(token: Emitted) -> dict[str, Any]:
    top = [{"token_id": token_id, "logprob": logprob} for token_id, logprob in token.top_logprobs]
    return {"token_id": token.token_id, "logprob": token.logprob, "top": top}
