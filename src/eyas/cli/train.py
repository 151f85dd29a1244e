"""``eyas train``: a drafter for a target, from what the target wrote. Its flags are the fields of TrainConfig."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from eyas.cli.console import INTERRUPTED, console, notice, quiet_libraries
from eyas.cli.options import Debug, Json, Target, spread
from eyas.cli.records import print_json
from eyas.cli.tables import grid
from eyas.training.config import Flag, TrainConfig

if TYPE_CHECKING:
    from eyas.training.plan import Plan
    from eyas.training.trainer import Evaluated, Progress, Report, TrainResult

LINE_EVERY = 30.0  # seconds between lines where there is no terminal
RECORD_EVERY = 10  # updates between records of --json


def _flags() -> type:
    """A group of flags for ``spread``, from what the fields of TrainConfig say of themselves."""
    hints, made = get_type_hints(TrainConfig, include_extras=True), []
    for setting in fields(TrainConfig):
        kind, *about = get_args(hints[setting.name]) if setting.default is not MISSING else (None,)
        if not about or not isinstance(flag := about[0], Flag):
            continue
        names = [f"--{setting.name.replace('_', '-')}"] if kind is bool else []
        shown: bool | str = flag.default if flag.default is not None else True
        option = typer.Option(
            *names, help=flag.help, rich_help_panel=flag.group, show_default=shown, metavar=flag.metavar
        )
        made.append((setting.name, Annotated[kind, option], field(default=setting.default)))
    return make_dataclass("TrainFlags", made, frozen=True)


TrainFlags: Any = _flags()


@spread
def train(
    target: Target,
    *,
    data: Annotated[Path, typer.Option(help="What `eyas data` wrote.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The drafter's folder; empty, or new.", show_default=False)],
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what would be done, and how long it takes, and stop.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
    flags: TrainFlags,
) -> None:
    """Train a drafter from what its target wrote. OUT is ready for Eyas, SGLang and vLLM, and can be resumed.

    Ctrl-C stops after the update under way, and --resume goes on as if nothing had happened. While it is trained, the
    drafter is measured by real decoding, and the best one is kept.

    Examples:
    eyas train smollm2 --data ./data --out ./drafter --plan

    eyas train smollm2 --data ./data --out ./drafter

    eyas train smollm2 --data ./data --out ./drafter --resume

    eyas train smollm2 --data ./more --out ./better --drafter ./drafter
    """
    config = TrainConfig(target=target, data=str(data), out=str(out), **asdict(flags))
    if not debug:
        quiet_libraries()
    if plan:
        from eyas.training.plan import plan as make

        with following(as_json) as report:
            planned = make(config, report)
        show_plan(planned, as_json)
        return
    from eyas.training.trainer import train as run

    with following(as_json) as report:
        done = run(config, report)
    if done.main:
        show_result(done, as_json)
    if done.interrupted:
        raise typer.Exit(INTERRUPTED)


@contextmanager
def following(as_json: bool) -> Iterator[Report]:
    """On a terminal a bar; elsewhere a line now and then, and with --json records of everything."""
    from eyas.training.trainer import Evaluated

    with records() if as_json else bar() if console(stderr=True).is_terminal else lines() as show:

        def report(news: Progress | Evaluated | str) -> None:
            if isinstance(news, str) and not as_json:
                notice(news)
            elif isinstance(news, Evaluated) and not as_json:
                notice(evaluation(news))
            else:
                show(news)

        yield report


Show = Callable[[Any], None]


@contextmanager
def records() -> Iterator[Show]:
    from eyas.training.trainer import Progress

    def show(news: Any) -> None:
        if isinstance(news, str):
            print_json({"note": news})
        elif not isinstance(news, Progress) or news.step % RECORD_EVERY == 0 or news.step == news.steps:
            print_json(asdict(news))

    yield show


@contextmanager
def lines() -> Iterator[Show]:
    err, last = console(stderr=True), time.monotonic()

    def show(news: Progress) -> None:
        nonlocal last
        if news.step in (1, news.steps) or time.monotonic() - last > LINE_EVERY:
            err.print(f"{news.step:,}/{news.steps:,}  {summary(news)}", soft_wrap=True)
            last = time.monotonic()

    yield show


@contextmanager
def bar() -> Iterator[Show]:
    from rich import progress

    columns = (progress.BarColumn(), progress.MofNCompleteColumn(), "{task.description}")
    with progress.Progress(*columns, console=console(stderr=True), redirect_stdout=False) as bars:
        task = bars.add_task("", total=None)
        yield lambda news: bars.update(task, description=summary(news), total=news.steps, completed=news.step)


def summary(news: Progress) -> str:
    agreement = " ".join(f"{rate:.2f}" for rate in news.agreement)
    return (
        f"loss {news.loss:.3f}  agreement by step {agreement}  {news.tokens_per_second:,.0f} tok/s  "
        f"{duration(news.seconds_left)} left"
    )


def evaluation(news: Evaluated) -> str:
    found = news.evaluation
    tasks = ", ".join(f"{task} {length:.2f}" for task, length in found.by_task.items())
    rates = " ".join(f"{rate:.2f}" for rate in found.acceptance_rates)
    best = "the best so far, kept" if news.best else "not better than before"
    return (
        f"after {found.step:,} updates: acceptance length {found.acceptance_length:.2f} ({tasks}), "
        f"by position {rates}: {best}"
    )


def show_result(done: TrainResult, as_json: bool) -> None:
    if as_json:
        print_json(asdict(done) | {"out": str(done.out), "finished": done.finished})
        return

    rows = [
        ("drafter", str(done.out) + ("" if done.finished else ", unfinished: --resume goes on")),
        ("updates", f"{done.step:,} of {done.steps:,}, {done.tokens:,} tokens in {duration(done.seconds)}"),
    ]
    if done.best is not None:
        rates = ", ".join(f"{rate:.2f}" for rate in done.best.acceptance_rates)
        tasks = ", ".join(f"{task} {length:.2f}" for task, length in done.best.by_task.items())
        rows += [
            ("acceptance length", f"{done.best.acceptance_length:.2f} ({tasks}), after {done.best.step:,} updates"),
            ("by position", rates),
        ]
    console().print(grid(rows))


def show_plan(planned: Plan, as_json: bool) -> None:
    if as_json:
        print_json(asdict(planned))
        return

    p = planned
    rows = [
        ("data", f"{p.conversations:,} conversations, {p.tokens:,} tokens, {p.written:,} of them by the target"),
        ("", f"{p.held_out:,} held out to measure on, {p.left_out:,} left out"),
        ("draft vocabulary", f"{p.draft_vocab_size:,} tokens, {p.coverage:.2%} of what the target wrote"),
        ("drafter", f"{p.parameters / 1e6:,.1f}M weights are trained, unrolled for {p.unroll} steps"),
        ("training", f"{p.updates:,} updates of {p.tokens_per_update:,.0f} tokens, {p.total_tokens:,} in all"),
        ("machine", f"{p.device}, {p.precision}"),
        ("memory", f"{p.peak_bytes / 2**30:.1f} GiB, measured"),
        ("time", f"{duration(p.seconds)} at {p.tokens_per_second:,.0f} tokens/s, measured; evaluations come on top"),
    ]
    console().print(grid(rows))


def duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"
