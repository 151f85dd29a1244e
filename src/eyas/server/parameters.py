"""From a request's fields to how its tokens are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.core import SamplingParams, UsageError
from eyas.server.errors import refused
from eyas.server.protocol import ChatRequest, CompletionRequest, Shared

OPEN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # what a target may have a default for
SETTLED = (
    *("min_tokens", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("ignore_eos", "stop", "stop_token_ids", "seed"),
)
COMPLETION_TOKENS = 16  # OpenAI's default


def default_sampling(model: Any) -> dict[str, Any]:
    """What the target's own generation config recommends, as vLLM and SGLang take it."""
    config = getattr(model, "generation_config", None)
    found = config.to_diff_dict() if config is not None else {}
    return {name: found[name] for name in OPEN if found.get(name) is not None}


def sampling_params(
    asked: ChatRequest | CompletionRequest, defaults: Mapping[str, Any], room: int, vocab_size: int
) -> SamplingParams:
    """Raises ApiError for values that do not go together.

    ``defaults`` are for what the request leaves open, ``room`` is what the context has for the answer.
    """
    from eyas.speculation.sampling import check_bias  # and with it torch, which is there by now

    given = {"temperature": 1.0, **defaults}
    given |= {name: value for name in OPEN if (value := getattr(asked, name)) is not None}
    given |= {name: getattr(asked, name) for name in SETTLED}
    if isinstance(asked, ChatRequest):
        # OpenAI has replaced the one by the other; of both, its own clients mean the new one
        max_tokens = asked.max_completion_tokens or asked.max_tokens or room
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    else:
        max_tokens, logprobs = asked.max_tokens or COMPLETION_TOKENS, asked.logprobs
    try:
        made = SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs)
        check_bias(made, vocab_size)
    except UsageError as error:
        name = str(error).split()[0]
        raise refused(name if name in Shared.model_fields else None, f"{str(error).rstrip('.')}.") from error
    return made
