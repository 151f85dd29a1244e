"""How SGLang is asked for one answer whose drafts are to be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Eager, since graphs hide the calls; without a prefix cache, since its slots would not be seen being filled; in chains.
FLAGS = (
    *("--disable-cuda-graph", "--disable-radix-cache", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
)
PATH = "/generate"


def body(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    return {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }


def answer(reply: dict[str, Any]) -> list[int]:
    return reply["output_ids"]
