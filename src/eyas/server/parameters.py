"""From a request's fields to how its tokens are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eyas.core import SamplingParams, StructuredOutputsParams, UsageError
from eyas.server.errors import refused
from eyas.server.protocol import ChatRequest, CompletionRequest, Shared, StructuredOutputs

if TYPE_CHECKING:
    from eyas.engine.serving import AsyncLLM

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
    asked: ChatRequest | CompletionRequest,
    outputs: StructuredOutputsParams | None,
    defaults: Mapping[str, Any],
    room: int,
    vocab_size: int,
) -> SamplingParams:
    """Raises ApiError for values that do not go together.

    ``outputs`` is the request's ``constraint``. ``defaults`` are for what the request leaves open, ``room`` is what the
    context has for the answer.
    """
    from eyas.speculation.sampling import check_bias  # and with it torch, which is there by now

    given = {"temperature": 1.0, **defaults}
    given |= {name: value for name in OPEN if (value := getattr(asked, name)) is not None}
    given |= {name: getattr(asked, name) for name in SETTLED}
    given["structured_outputs"] = outputs
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


async def constraint(engine: AsyncLLM, asked: Shared) -> StructuredOutputsParams | None:
    """What the answer has to be, compiled before anything is queued.

    Raises ApiError for what cannot be compiled, for several constraints, and for half of one.
    """
    found = [(name, fields) for name, fields in constraints(asked).items() if fields]
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise refused(found[1][0], f"{names} cannot both be given: one of them has to say what the answer is.")
    name, fields = found[0]
    try:
        outputs = StructuredOutputsParams(**fields)
        await engine.compile(outputs)
    except UsageError as error:
        raise refused(name, str(error)) from error
    return outputs


def constraints(asked: Shared) -> dict[str, dict[str, Any]]:
    """By the name of each field that may constrain the answer, what it says in the engine's words: nothing, mostly."""
    form, own = asked.response_format, asked.structured_outputs
    schema = {"json": form.json_schema.schema_} if form and form.json_schema else {}
    if form and form.type == "json_schema" and not schema:
        raise refused("response_format.json_schema", "response_format.json_schema is required with type json_schema.")
    formats: dict[str, dict[str, Any]] = {"text": {}, "json_object": {"json_object": True}, "json_schema": schema}
    names = {field.alias or name: name for name, field in StructuredOutputs.model_fields.items()}
    given = {name: value for name, field in names.items() if (value := getattr(own, field, None)) is not None}
    if own is not None and not given:
        raise refused("structured_outputs", f"structured_outputs must have one of {', '.join(names)}.")
    return {
        "response_format": formats[form.type] if form else {},
        "structured_outputs": given,
        "json_schema": {"json": asked.json_schema} if asked.json_schema is not None else {},
        "regex": {"regex": asked.regex} if asked.regex is not None else {},
        "ebnf": {"grammar": asked.ebnf} if asked.ebnf is not None else {},
    }
