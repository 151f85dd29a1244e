"""How vLLM is asked for one answer whose drafts are to be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Eager, since compiled code hides the calls; without a prefix cache, since its slots would not be seen being filled.
FLAGS = ("--enforce-eager", "--no-enable-prefix-caching")
PATH = "/v1/completions"


def body(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    asked = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return asked | {"return_token_ids": True}


def answer(reply: dict[str, Any]) -> list[int]:
    return reply["choices"][0]["token_ids"]
