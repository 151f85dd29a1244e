"""``eyas data``: training data, written by the target itself."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli.console import clean, console, counted, notice, progress, quiet_libraries
from eyas.cli.options import Debug, EngineFlags, Json, LoadingFlags, Target, numbers, refuse, spread
from eyas.cli.records import print_json
from eyas.cli.tables import grid
from eyas.core import UsageError

if TYPE_CHECKING:
    import numpy as np
    from rich.text import Text

    from eyas.training.commission import Commission, Described
    from eyas.training.dataset import Dataset, Row
    from eyas.training.making import Making

HERE, ENDPOINT = 32, 64  # conversations at a time
_prompts: Callable[..., Any] = partial(typer.Option, rich_help_panel="Prompts")
_answers: Callable[..., Any] = partial(typer.Option, rich_help_panel="Answers")
_server: Callable[..., Any] = partial(typer.Option, rich_help_panel="Server")


@spread
def data(
    target: Target,
    *,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The folder to write, or to go on with.", show_default=False)
    ],
    conversations: Annotated[
        int | None, typer.Option(metavar="N", help="How many to make in all. Default: 1000, or all of --prompts.")
    ] = None,
    show: Annotated[
        int | None,
        typer.Option(metavar="N", help="Make nothing: show N samples of what is in --out, and statistics."),
    ] = None,
    prompts: Annotated[
        Path | None,
        _prompts(
            metavar="FILE",
            help="JSON lines with messages, ShareGPT conversations or a prompt. Default: the target asks itself.",
        ),
    ] = None,
    keep_answers: Annotated[
        bool,
        _prompts("--keep-answers", help="The answers in --prompts are the target's own already."),
    ] = False,
    kind: Annotated[
        list[str] | None,
        _prompts(metavar="KIND", help="Only prompts of this kind: code, maths, ... (repeatable)."),
    ] = None,
    topics: Annotated[
        Path | None,
        _prompts(metavar="FILE", help="What to ask about, one topic a line."),
    ] = None,
    system: Annotated[
        list[str] | None,
        _prompts(metavar="TEXT", help="The system message; several are mixed. Default: several, and none."),
    ] = None,
    prompt_temperatures: Annotated[
        str, _prompts(metavar="T,T,...", help="Of the target when it asks, mixed.")
    ] = "0.7,1",
    max_prompt_tokens: Annotated[int, _prompts(help="Longest prompt that the target writes.")] = 192,
    temperatures: Annotated[str, _answers(metavar="T,T,...", help="Of the answers, mixed.")] = "0,0.3,0.7,1",
    top_p: Annotated[float, _answers(help="Only the likeliest tokens that make up p.")] = 1.0,
    max_answer_tokens: Annotated[int, _answers(help="Longest answer.")] = 512,
    max_length: Annotated[
        int | None,
        _answers(help="Longest conversation, in tokens.", show_default="2048"),
    ] = None,
    chat_template_kwargs: Annotated[
        str | None,
        _answers(metavar="JSON", help="""Such as '{"enable_thinking": false}'."""),
    ] = None,
    seed: Annotated[int, typer.Option(help="Another one makes other conversations.")] = 0,
    endpoint: Annotated[
        str | None,
        _server(
            metavar="URL",
            help="Let a server answer (SGLang, vLLM, ...; its key from OPENAI_API_KEY). Default: the target runs here.",
        ),
    ] = None,
    model: Annotated[str | None, _server(help="The server's name for it, if it serves several.")] = None,
    retries: Annotated[int, _server(help="How often to ask again a server that fails.")] = 8,
    concurrency: Annotated[
        int | None, typer.Option(help="Conversations at a time.", show_default=f"{HERE}; of a server {ENDPOINT}")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
    engine: EngineFlags,
    loading: LoadingFlags,
) -> None:
    """Let the target write training data: prompts of its own or yours, and its answers to them.

    Whatever stops it, the same command goes on where it was.

    Examples:
    eyas data smollm2 --out ./data --conversations 5000

    eyas data ./my-model --out ./data --prompts chats.jsonl --endpoint http://127.0.0.1:30000

    eyas data smollm2 --out ./data --show 3
    """
    refuse(
        (endpoint is None and model is not None, "--model names a model of an --endpoint."),
        (
            prompts is not None and (kind or topics or system),
            "--kind, --topics and --system steer prompts that the target writes: they exclude --prompts.",
        ),
        (show is not None and show < 0, "--show takes a number of samples, 0 for the statistics only."),
        (retries < 0, "--retries must be at least 0."),
    )
    if show is not None:
        show_samples(target, out, show, loading.trust_remote_code, as_json)
        return
    from eyas.training.commission import Commission
    from eyas.training.making import Settings
    from eyas.training.selfmade import KINDS
    from eyas.training.topics import TOPICS

    wanted = Commission(
        out=out,
        conversations=1000 if conversations is None and prompts is None else conversations,
        prompts=prompts,
        keep_answers=keep_answers,
        seed=seed,
        kinds=tuple(kind or KINDS),
        topics=read_topics(topics) if topics else TOPICS,
        systems=tuple(system) if system else None,
        template=as_object(chat_template_kwargs),
        settings=Settings(
            temperatures=numbers("--temperatures", temperatures, float),
            prompt_temperatures=numbers("--prompt-temperatures", prompt_temperatures, float),
            top_p=top_p,
            max_answer_tokens=max_answer_tokens,
            max_prompt_tokens=max_prompt_tokens,
            max_length=Settings.max_length if max_length is None else max_length,
        ),
        concurrency=(ENDPOINT if endpoint else HERE) if concurrency is None else concurrency,
    )
    stop_cleanly()
    if endpoint is not None:
        made = through_endpoint(target, wanted, endpoint, model, retries, loading.trust_remote_code)
    else:
        made = in_process(target, wanted, engine, loading, debug)
    show_statistics(made, as_json)


def stop_cleanly() -> None:
    """Being told to end is like Ctrl-C: what is there becomes a shard."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def through_endpoint(
    target: str, wanted: Commission, endpoint: str, model: str | None, retries: int, trust_remote_code: bool
) -> Dataset:
    from eyas.training.answering import EndpointAnswerer, base_url
    from eyas.training.commission import make_data

    base_url(endpoint)  # a wrong address is refused before anything is read
    described = describe(target, trust_remote_code)
    with progress("asking the server") as report:
        return make_data(
            described,
            wanted,
            lambda chat: EndpointAnswerer(endpoint, chat, model=model, concurrency=wanted.concurrency, retries=retries),
            Reporter(report, wanted.conversations),
        )


def in_process(target: str, wanted: Commission, engine: EngineFlags, loading: LoadingFlags, debug: bool) -> Dataset:
    from eyas.training.answering import EngineAnswerer
    from eyas.training.commission import Described, make_data
    from eyas.training.dataset import require_pyarrow

    require_pyarrow()  # loading takes long
    llm = loading.load(target, None, None, engine, debug=debug)
    if wanted.settings.max_length > llm.context_length:
        notice(f"Conversations get no longer than the context of {llm.context_length} tokens.")
        wanted = replace(wanted, settings=replace(wanted.settings, max_length=llm.context_length))
    with progress("the target answers") as report:
        return make_data(
            Described.of(llm), wanted, lambda chat: EngineAnswerer(llm), Reporter(report, wanted.conversations)
        )


def describe(target: str, trust_remote_code: bool) -> Described:
    from eyas.training.commission import Described

    quiet_libraries()
    return Described.read(target, trust_remote_code)


class Reporter:
    """How far it is: once a second at a terminal, twice a minute elsewhere."""

    def __init__(self, report: Any, wanted: int | None):
        self._report, self._wanted = report, wanted
        self._every = 1.0 if console(stderr=True).is_terminal else 30.0
        self._begin = self._last = time.monotonic()
        self._first: int | None = None

    def __call__(self, making: Making) -> None:
        now = time.monotonic()
        self._first = making.conversations if self._first is None else self._first
        if now - self._last < self._every:
            return
        self._last = now
        self._report(self._text(making, now - self._begin), self._done(making))

    def _done(self, making: Making) -> float | None:
        return min(1.0, making.conversations / self._wanted) if self._wanted else None

    def _text(self, making: Making, seconds: float) -> str:
        of = f" of {self._wanted:,}" if self._wanted else ""
        text = f"{making.conversations:,}{of} conversations, {making.loss_tokens / seconds:,.0f} tokens/s"
        fresh = making.conversations - (self._first or 0)
        if self._wanted and fresh:
            left = (self._wanted - making.conversations) * seconds / fresh
            text += f", {int(left) // 60}:{int(left) % 60:02} min left"
        return f"{text}; {making.trouble}" if making.trouble else text


def read_topics(file: Path) -> tuple[str, ...]:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}.") from error
    return tuple(line for line in lines if line)


def as_object(text: str | None) -> dict[str, Any]:
    try:
        content = json.loads(text or "{}")
    except ValueError as error:
        raise UsageError(f"--chat-template-kwargs is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise UsageError(f"--chat-template-kwargs takes a JSON object, got {text!r}.")
    return content


# What is there


def show_samples(target: str, folder: Path, number: int, trust_remote_code: bool, as_json: bool) -> None:
    from eyas.training.dataset import Dataset

    found = Dataset.open(folder)
    described = describe(target, trust_remote_code)
    found.manifest.check_target(described.tokenizer, described.vocab_size)
    step = max(1, len(found) // max(1, number))
    for index in range(0, len(found), step)[:number]:
        show_row(found, index, described.tokenizer, as_json)
    show_statistics(found, as_json)


def show_row(found: Dataset, index: int, tokenizer: Any, as_json: bool) -> None:
    row = found[index]
    if as_json:
        pieces = [{"text": tokenizer.decode(ids), "loss": loss} for ids, loss in pieces_of(row)]
        print_json({"row": index, "source": row.source, "provenance": row.provenance, "pieces": pieces})
        return
    from rich.text import Text

    out = console()
    facts = ", ".join(f"{key} {value}" for key, value in row.provenance.items() if key != "prompt")
    out.print(
        Text(
            clean(f"row {index}: {counted(len(row.ids), 'token')}, {int(row.mask.sum()):,} of the target; {facts}"),
            "bold",
        )
    )
    out.print(tinted(row, tokenizer, plain=out.color_system is None))
    out.print()


def tinted(row: Row, tokenizer: Any, plain: bool) -> Text:
    """What the target wrote in green; in brackets where there are no colours."""
    from rich.text import Text

    text = Text()
    for ids, loss in pieces_of(row):
        piece = clean(tokenizer.decode(ids))
        text.append(f"\u27e6{piece}\u27e7" if loss and plain else piece, "green" if loss else "dim")
    return text


def pieces_of(row: Row) -> Iterator[tuple[np.ndarray, bool]]:
    import numpy as np

    ends = np.flatnonzero(np.diff(row.mask)) + 1
    for ids, mask in zip(np.split(row.ids, ends), np.split(row.mask, ends), strict=True):
        yield ids, bool(mask[0])


def show_statistics(found: Dataset, as_json: bool) -> None:
    from dataclasses import asdict

    from eyas.training.statistics import diversity

    manifest = found.manifest
    figures = manifest.diversity or diversity(found)
    if as_json:
        print_json(asdict(manifest) | {"diversity": figures, "folder": str(found.folder)})
        return

    rows = [
        ("data", f"{found.folder}{'' if manifest.complete else ' (unfinished)'}"),
        ("target", manifest.target),
        ("rows", f"{manifest.rows:,} with {manifest.tokens:,} tokens, {manifest.loss_tokens:,} of them the target's"),
    ]
    if manifest.dropped:
        rows.append(("dropped", ", ".join(f"{reason} {count:,}" for reason, count in manifest.dropped.items())))
    for name, value in figures.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {figure}" for key, figure in value.items())
        rows.append((name.replace("_", " "), str(value)))
    console().print(grid(rows))
