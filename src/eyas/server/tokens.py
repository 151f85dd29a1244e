"""``/tokenize`` and ``/detokenize``, as vLLM has them: how long a prompt is, without asking the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI
from pydantic import Field
from starlette.responses import Response

from eyas.server.errors import JSON, refused
from eyas.server.protocol import MOST, Asked, Ids, Message, check_known

if TYPE_CHECKING:
    from eyas.server.service import Service


class TokenizeRequest(Asked):
    """Of ``prompt`` and ``messages`` one is given."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST, fail_fast=True)] | None = None
    add_special_tokens: bool = Field(True, description="Of a prompt; with messages it is the template's to say.")
    chat_template_kwargs: dict[str, Any] = Field({})
    return_token_strs: bool = False


class DetokenizeRequest(Asked):
    model: str | None = None
    tokens: Ids


FIELDS = frozenset(TokenizeRequest.model_fields) | frozenset(DetokenizeRequest.model_fields)


def add_tokens(app: FastAPI, service: Service, **described: Any) -> None:
    @app.post("/tokenize", **described)
    async def tokenize(asked: TokenizeRequest) -> Response:
        service.check_model(asked.model)
        check_known(asked)
        if (asked.prompt is None) == (asked.messages is None):
            raise refused("prompt", "Give either a prompt or messages.")
        engine = service.engine
        ids, strings = await service.encode(engine, service.encoder.tokens, asked)
        room = engine.llm.context_length
        return JSON({"count": len(ids), "max_model_len": room, "tokens": ids, "token_strs": strings})

    @app.post("/detokenize", **described)
    async def detokenize(asked: DetokenizeRequest) -> Response:
        service.check_model(asked.model)
        check_known(asked)
        return JSON({"prompt": await service.encode(service.engine, service.encoder.text, asked.tokens)})
