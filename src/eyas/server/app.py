"""The addresses of the server, and what each of them does."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from eyas import __version__
from eyas.engine.serving import AsyncLLM
from eyas.server.answers import Answers
from eyas.server.chat import ChatAnswers
from eyas.server.completions import CompletionAnswers
from eyas.server.errors import JSON, add_handlers
from eyas.server.gate import Gate
from eyas.server.pages import add_pages
from eyas.server.parameters import constraint, sampling_params
from eyas.server.protocol import FIELDS, ChatRequest, CompletionRequest, ErrorBody, check_fields, prompts_of
from eyas.server.record import Record
from eyas.server.service import News, Service
from eyas.server.stream import EventStream
from eyas.server.tokens import FIELDS as TOKEN_FIELDS
from eyas.server.tokens import add_tokens
from eyas.server.upkeep import add_upkeep

ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorBody}, "5XX": {"model": ErrorBody}}


def make_app(service: Service) -> Gate:
    """The ASGI application. FastAPI's own pages are left out: they load scripts from elsewhere."""
    app = FastAPI(title="Eyas", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    add_handlers(app, FIELDS | TOKEN_FIELDS)
    _add_completions(app, service)
    _add_models(app, service)
    _add_state(app, service)
    add_tokens(app, service, responses=ERRORS)
    add_upkeep(app, service, responses=ERRORS)
    add_pages(app)
    return Gate(app, service)


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses=ERRORS)
    async def chat_completions(asked: ChatRequest, request: Request) -> Response:
        engine = check(service, asked)
        prompts = await service.encode(engine, service.encoder.chat, asked)
        answers = ChatAnswers(asked, prompts, service.settings.model_name, engine.llm.tokenizer)
        return await respond(service, engine, answers, request.state.record)

    @app.post("/v1/completions", responses=ERRORS)
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        engine = check(service, asked)
        prompts = await service.encode(engine, service.encoder.completion, asked)
        answers = CompletionAnswers(asked, prompts, service.settings.model_name, engine.llm.tokenizer)
        return await respond(service, engine, answers, request.state.record)


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", responses=ERRORS)
    async def models() -> Response:
        return JSON({"object": "list", "data": [model_card(service)]})

    @app.get("/v1/models/{name:path}", responses=ERRORS)
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSON(model_card(service))

    @app.get("/get_model_info", responses=ERRORS, deprecated=True)
    @app.get("/model_info", responses=ERRORS)
    async def model_info() -> Response:
        return JSON(model_facts(service))


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses=ERRORS)
    async def health() -> Response:
        """200 as long as requests are answered."""
        _ = service.engine
        return JSON({"status": service.status})

    @app.get("/health_generate", responses=ERRORS)
    async def health_generate() -> Response:
        """As in SGLang, 200 once the engine makes a token: anybody's, or where nobody is answered one for this."""
        await service.alive()
        return JSON({"status": service.status})

    @app.get("/metrics", responses=ERRORS)
    async def metrics() -> Response:
        return Response(service.metrics.text(await service.snapshot()), media_type=CONTENT_TYPE_LATEST)

    @app.get("/get_server_info", responses=ERRORS, deprecated=True)
    @app.get("/server_info", responses=ERRORS)
    async def server_info() -> Response:
        return JSON(await described(service))


def check(service: Service, asked: ChatRequest | CompletionRequest) -> AsyncLLM:
    """All that can be said before the prompt is read; the engine for whoever passes, who is let in from now on."""
    service.check_model(asked.model)
    check_fields(asked)
    return service.check_open(asked.n * (len(prompts_of(asked.prompt)) if isinstance(asked, CompletionRequest) else 1))


async def respond(service: Service, engine: AsyncLLM, answers: Answers, record: Record) -> Response:
    room, vocab_size = engine.llm.context_length, engine.llm.target.vocab_size
    outputs = await constraint(engine, answers.asked)
    samplings = [
        sampling_params(answers.asked, outputs, service.defaults, room - len(prompt.ids), vocab_size)
        for prompt in answers.prompts
    ]
    record.prompt_tokens = sum(len(prompt.ids) for prompt in answers.prompts)
    news = service.answer(engine, answers.requests(samplings), record)
    if answers.asked.stream:
        # the status goes out with the first token: what is wrong until then has a status of its own
        return EventStream(chunks(answers, await anext(news), news, record), record)
    async with aclosing(news):
        async for number, output in news:
            answers.take(number, output)
    record.cached_tokens = answers.cached_tokens
    return JSON(answers.whole())


async def chunks(
    answers: Answers, first: News, outputs: AsyncGenerator[News, None], record: Record
) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(outputs):
        for chunk in answers.chunks(*first):
            yield chunk
        async for number, output in outputs:
            for chunk in answers.chunks(number, output):
                yield chunk
    record.cached_tokens = answers.cached_tokens
    if last := answers.last_chunk():
        yield last


def model_card(service: Service) -> dict[str, Any]:
    llm = service.llm
    return {
        "id": service.settings.model_name,
        "object": "model",
        "created": service.began,
        "owned_by": "eyas",
        "root": llm.name,
        "parent": None,
        "max_model_len": llm.context_length,
    }


def model_facts(service: Service) -> dict[str, Any]:
    """In SGLang's names."""
    llm = service.llm
    config = llm.target.model.config
    return {
        "model_path": llm.name,
        "tokenizer_path": llm.tokenizer.name_or_path,
        "served_model_name": service.settings.model_name,
        "is_generation": True,
        "has_image_understanding": llm.processor is not None,
        "has_audio_understanding": False,
        "model_type": config.model_type,
        "architectures": config.architectures,
    }


async def described(service: Service) -> dict[str, Any]:
    """What the server runs with and how it goes; the speculative settings in SGLang's names."""
    llm, seen, stats = service.llm, await service.snapshot(), service.metrics.acceptance
    shape = llm.engine.shape if llm.drafter is not None else None
    return {
        "version": __version__,
        "status": service.status,
        "model_path": llm.name,
        "served_model_name": service.settings.model_name,
        "context_length": llm.context_length,
        "has_image_understanding": llm.processor is not None,
        "dtype": str(llm.target.dtype).removeprefix("torch."),
        "device": str(llm.target.device),
        "max_running_requests": llm.engine.scheduler.max_running,
        "max_queued_requests": service.settings.max_queued_requests,
        "max_total_num_tokens": llm.engine.scheduler.rows,
        "speculation": type(llm.engine.policy).__name__.lower(),
        "speculative_num_steps": shape.num_steps if shape else None,
        "speculative_eagle_topk": shape.eagle_topk if shape else None,
        "speculative_num_draft_tokens": shape.num_draft_tokens if shape else None,
        "acceptance": {
            "steps": stats.steps,
            "drafted": stats.drafted,
            "accepted": sum(stats.accepted),
            "length": stats.acceptance_length,
            "rate_by_position": stats.acceptance_rates,
        },
        # where SGLang's clients look for the acceptance length, and how many run at a time
        "internal_states": [
            {
                "avg_spec_accept_length": stats.acceptance_length if stats.steps else None,
                "effective_max_running_requests_per_dp": llm.engine.scheduler.max_running,
            }
        ],
        "policy": asdict(seen.policy) if seen else None,
        "num_running_reqs": seen.running if seen else 0,
        "num_queue_reqs": seen.waiting if seen else 0,
    }
