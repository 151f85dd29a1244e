"""What clients may ask, in OpenAI's names and, beyond those, in vLLM's and SGLang's."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from eyas.server.errors import refused

MAX_N = 128
MAX_BIAS = 1024
MOST = 10_000  # messages, parts of one, prompts
INT32, INT64 = (1 << 31) - 1, (1 << 63) - 1
Count = Annotated[int, Field(ge=1, le=INT32)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]

# Fields that change no answer: they are taken and not looked at.
HARMLESS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    | {"parallel_tool_calls", "prediction", "priority", "request_id", "rid"}
)

# The same, of what stands within a request.
HARMLESS_WITHIN = frozenset({"name", "refusal", "annotations", "detail", "cache_control", "include_obfuscation"})

# Fields that would change the answer if we had them, and the values with which they would not.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tools", "functions", "bad_words", "documents", "logits_processors"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("echo", "use_beam_search", "early_stopping", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("no_stop_trim", "continue_final_message", "return_tokens_as_token_ids"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("best_of", "length_penalty"), (1,)),
    **dict.fromkeys(("audio", "web_search_options", "reasoning_effort", "chat_template", "lora_path"), ()),
    **dict.fromkeys(("add_special_tokens", "truncate_prompt_tokens", "prompt_logprobs", "allowed_token_ids"), ()),
    **dict.fromkeys(("structural_tag", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    **dict.fromkeys(("custom_logit_processor", "return_hidden_states"), ()),
    **dict.fromkeys(("repetition_detection", "cache_salt"), ()),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "suffix": ("",),
}


class Asked(BaseModel):
    """null stands for a field that is not there. Fields that are not ours are kept, to be told apart."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else value


class StreamOptions(Asked):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Asked):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = Field(False, description="The schema is always kept to.")


class ResponseFormat(Asked):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Asked):
    """vLLM's field: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A JSON schema.")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MOST, fail_fast=True)] | None = None
    grammar: str | None = Field(None, description="Lark, or GBNF (EBNF).")


class ImageUrl(Asked):
    url: str


class Part(Asked):
    """A piece of a message."""

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None


class Message(Asked):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Field(max_length=MOST, fail_fast=True)] | None = None


class Shared(Asked):
    """What both endpoints take."""

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_N)
    max_tokens: Count | None = None
    min_tokens: int = Field(0, ge=0, le=INT32)
    temperature: float | None = Field(None, ge=0, le=1000)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT32, description="0 and -1 are off.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float = Field(0, ge=-2, le=2)
    frequency_penalty: float = Field(0, ge=-2, le=2)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = Field({}, max_length=MAX_BIAS)
    seed: int | None = Field(None, ge=-INT64 - 1, le=INT64, description="The n-th answer counts n - 1 up from it.")
    stop: Stop | Annotated[list[Stop], Field(max_length=64, fail_fast=True)] = []
    stop_token_ids: list[int] = Field([], max_length=64)
    ignore_eos: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: str | None = Field(None, description="As SGLang has it: a JSON schema as text.")
    regex: str | None = Field(None, description="As SGLang has it.")
    ebnf: str | None = Field(None, description="As SGLang has it.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = Field(False, description="As vLLM has it: token_ids of answers, and of prompts.")
    return_draft_positions: bool = Field(
        False, description="draft_positions of tokens (from 1; 0: the target's own) and their token_texts."
    )
    speculation: Literal["auto", "off"] = Field(
        "auto", description="off decodes this request plainly: the text stays the same."
    )

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        """pydantic counts a dict behind looking at all of it: millions of wrong entries are one error."""
        if isinstance(value, dict) and len(value) > MAX_BIAS:
            raise PydanticCustomError("logit_bias", "at most 1024 tokens are taken")
        return value


class ChatRequest(Shared):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST, fail_fast=True)]
    chat_template_kwargs: dict[str, Any] = Field({}, description="What the target's chat template is told besides.")
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)


# millions of wrong entries are one error
Ids = Annotated[list[int], Field(max_length=1 << 20, fail_fast=True)]
Texts = Annotated[list[str], Field(max_length=MOST, fail_fast=True)]
PromptField = str | Texts | Ids | Annotated[list[Ids], Field(max_length=MOST, fail_fast=True)]


class CompletionRequest(Shared):
    prompt: PromptField
    logprobs: int | None = Field(None, ge=0, le=20)

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _one_error(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("prompt", "expected text, token ids, or a list of either") from None


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorObject


PARTS = (Message, Part, ImageUrl, StreamOptions, ResponseFormat, JsonSchema, StructuredOutputs)
FIELDS = frozenset(
    field.alias or name
    for model in (ChatRequest, CompletionRequest, *PARTS)
    for name, field in model.model_fields.items()
)


def prompts_of(prompt: Any) -> list[Any]:
    """One text or one list of token ids is one prompt."""
    return [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt


def check_known(asked: Asked) -> None:
    """Raises ApiError for a field that changes the meaning of a request and is not there, and for one nobody knows."""
    for name, value in (asked.model_extra or {}).items():
        if name in HARMLESS or value in UNSUPPORTED.get(name, ()):
            continue
        if name in UNSUPPORTED:
            raise refused(name, f"{name} is not supported: leave it out.", "unsupported_parameter")
        name = name[:64]
        near = difflib.get_close_matches(name, type(asked).model_fields, 1)
        hint = f"do you mean {near[0]}?" if near else "see /openapi.json for what there is."
        raise refused(name, f"Unknown field {name!r}: {hint}", "unknown_parameter")


def check_fields(asked: ChatRequest | CompletionRequest) -> None:
    """Raises ApiError for fields that are not ours, in the request and its parts, and for some that need another."""
    check_known(asked)
    if asked.stream_options:
        check_within(asked.stream_options, "stream_options")
    for name in ("response_format", "structured_outputs"):
        if (part := getattr(asked, name)) is not None:
            check_within(part, name)
    if asked.response_format and asked.response_format.json_schema:
        check_within(asked.response_format.json_schema, "response_format.json_schema")
    if asked.stream_options and not asked.stream:
        raise refused("stream_options", "stream_options is for streams only: set stream to true, or leave it out.")
    if isinstance(asked, ChatRequest) and asked.top_logprobs and not asked.logprobs:
        raise refused("top_logprobs", "top_logprobs needs logprobs to be true.")


def check_within(given: Asked, where: str) -> None:
    """Raises ApiError for a field of a part of a request, which stands at ``where``, that is not supported."""
    for name, value in (given.model_extra or {}).items():
        if name not in HARMLESS_WITHIN and (name, value) != ("tool_calls", []):
            place = f"{where}.{name[:64]}"
            raise refused(place, f"{place} is not supported: leave it out.", "unsupported_parameter")
