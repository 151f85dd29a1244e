"""``eyas serve``: an OpenAI-compatible server over the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli.console import notice
from eyas.cli.options import Debug, EngineFlags, LoadingFlags, ShapeFlags, refuse, spread
from eyas.core import DraftShape, EyasError

if TYPE_CHECKING:
    from eyas.engine.llm import LLM

LEVELS = ("debug", "info", "warning", "error", "critical")
FORMAT = "%(asctime)s %(levelname)s %(message)s"
_engine: Callable[..., Any] = partial(typer.Option, rich_help_panel="Engine")
_server: Callable[..., Any] = partial(typer.Option, rich_help_panel="Server")
_limits: Callable[..., Any] = partial(typer.Option, rich_help_panel="Limits")


@dataclass(frozen=True)
class ServingFlags(EngineFlags):
    max_running_requests: Annotated[int, _engine(help="Answers made at a time; others wait.")] = 32

    def serving(self, shape: DraftShape | None, compare: bool) -> dict[str, Any]:
        return {**super().serving(shape, compare), "max_running_requests": self.max_running_requests}


@dataclass(frozen=True)
class ServerFlags:
    host: Annotated[str, _server(help="0.0.0.0 lets other machines in: give an --api-key then.")] = "127.0.0.1"
    port: Annotated[int, _server(help="0 is any that is free.")] = 30000
    served_model_name: Annotated[str | None, _server(help="What clients call the model.", show_default="TARGET")] = None
    api_key: Annotated[
        str | None,
        _server(envvar="EYAS_API_KEY", help="Clients send it as Authorization: Bearer KEY.", show_default=False),
    ] = None
    sampling_defaults: Annotated[
        str,
        _server(metavar="model|openai", help="Where sampling comes from that a request leaves open."),
    ] = "model"
    log_level: Annotated[str, _server(metavar="|".join(LEVELS), help="What goes to stderr.")] = "info"
    max_queued_requests: Annotated[
        int, _limits(help="Answers that may wait; whoever comes then is told to come later (429).")
    ] = 256
    max_body_mib: Annotated[int, _limits(help="Largest request.")] = 16
    drain_timeout: Annotated[float, _limits(help="Seconds that answers have left when the server is told to end.")] = 25


@spread
def serve(
    target: Annotated[
        str | None,
        typer.Argument(help="A model folder, a Hugging Face id, a GGUF file, or smollm2.", show_default=False),
    ] = None,
    *,
    model_path: Annotated[str | None, typer.Option(help="The same as TARGET.", show_default=False)] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter",
            "--speculative-draft-model-path",
            help="A drafter's folder or weights file, untrained (random weights), or none. "
            "Default: the one that comes with Eyas for this target.",
            show_default=False,
        ),
    ] = None,
    debug: Debug = False,
    server: ServerFlags,
    shape: ShapeFlags,
    engine: ServingFlags,
    loading: LoadingFlags,
) -> None:
    """Serve OpenAI's API (chat completions and completions), decoded with speculation.

    Examples:

    eyas serve smollm2

    eyas serve ./target --drafter ./drafter --port 8000 --max-running-requests 64

    eyas serve --model-path ./target --speculative-draft-model-path ./drafter --api-key "$KEY" --host 0.0.0.0
    """
    refuse(
        ((target is None) == (model_path is None), "Name one target: eyas serve TARGET, or --model-path TARGET."),
        (server.log_level not in LEVELS, f"--log-level is one of {', '.join(LEVELS)}, got {server.log_level!r}."),
        (server.sampling_defaults not in ("model", "openai"), "--sampling-defaults is model or openai."),
        (engine.max_running_requests < 1, "--max-running-requests must be at least 1."),
    )
    name = target or model_path
    assert name is not None
    run_server, settings = _server_and_settings(name, server)
    draft = shape.shape()
    if not settings.local and settings.api_key is None:
        notice(f"listening on {settings.host} without --api-key: whoever can reach this port can use the model.")
    chosen = _drafter(name, drafter, engine)
    log_to_stderr(server.log_level)
    run_server(lambda: loading.load(name, chosen, draft, engine, debug=debug), settings)


def _server_and_settings(name: str, flags: ServerFlags) -> tuple[Callable[[Callable[[], LLM], Any], None], Any]:
    try:
        from eyas.server.lifecycle import serve as run_server
        from eyas.server.settings import MIB, Settings
    except ImportError as error:
        raise EyasError(f"Serving needs FastAPI and uvicorn: install the extra eyas[serve] ({error}).") from error
    settings = Settings(
        model_name=name if flags.served_model_name is None else flags.served_model_name,
        host=flags.host,
        port=flags.port,
        api_key=flags.api_key,
        max_queued_requests=flags.max_queued_requests,
        max_body_bytes=flags.max_body_mib * MIB,
        drain_timeout=flags.drain_timeout,
        model_defaults=flags.sampling_defaults == "model",
    )
    return run_server, settings


def _drafter(target: str, asked: str | None, engine: EngineFlags) -> str | None:
    from eyas.cli.run import choose_drafter

    return choose_drafter(target, "none" if engine.speculation == "off" and asked is None else asked, compare=False)


def log_to_stderr(level: str) -> None:
    """One line for every request and event; of uvicorn what goes wrong."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT, "%Y-%m-%dT%H:%M:%S%z"))
    for name, least in (("eyas", 0), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(max(least, getattr(logging, level.upper())))
        logger.propagate = False
