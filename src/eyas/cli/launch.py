"""``eyas launch``: SGLang or vLLM with a drafter, checked before it loads anything and followed until it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

import typer

from eyas.cli.console import clean, console, error_line, notice, progress
from eyas.cli.options import Debug, EnginePython, Json
from eyas.cli.records import print_json
from eyas.core import UsageError

if TYPE_CHECKING:
    from rich.progress import Progress

    from eyas.bridges.failures import Diagnosis
    from eyas.bridges.following import Ended, Event
    from eyas.bridges.launch import Plan
    from eyas.bridges.plugin import Said
    from eyas.bridges.report import Report

# Unknown flags are the engine's. Without -h: vLLM's -dph would be taken for a -h among others.
SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]}
_TAIL = 15  # lines of a log that shows no traceback


def launch(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="The target's folder, or smollm2.", show_default=False)],
    drafter: Annotated[Path, typer.Option(help="The drafter's folder or weights file.", show_default=False)],
    engine: Annotated[Literal["sglang", "vllm"], typer.Option(help="Who is to run the pair.", show_default=False)],
    engine_python: EnginePython = None,
    log: Annotated[
        Path | None, typer.Option(help="Append the engine's log to this file instead of showing it.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, and print what would be run.")] = False,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Start the pair as it is: nothing is checked, nothing converted.")
    ] = False,
    no_plugin: Annotated[
        bool, typer.Option("--no-plugin", help="Add nothing to the engine, whatever its wrapper lacks.")
    ] = False,
    share_gpus: Annotated[
        bool, typer.Option("--share-gpus", help="Start although other processes compute on the GPUs.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Start SGLang or vLLM with a drafter: check, convert what has to be, add what the wrapper lacks, follow the log.

    The engine's own flags stand behind the target, as the engine knows them. Once the server answers it is followed
    until it ends; Ctrl-C and SIGTERM are passed on, a second one kills. Exits with the server's own code, or with 1 and
    a diagnosis where it does not start.

    Examples:
    eyas launch --engine vllm ./my-model --drafter ./my-drafter --port 8001 --spec-tokens 4

    eyas launch --engine sglang ./Kimi-K2.5 --drafter ./my-drafter --tp 8 --engine-python ~/sglang-env --log server.log

    eyas launch --engine sglang ./my-model --drafter ./my-drafter --dry-run
    """
    from eyas.bridges.launch import Asked, DoesNotFitError, check_free, plan, prepare

    if target.startswith("-"):
        raise UsageError(f"{target}: the target comes first, the engine's own flags behind it")
    asked = Asked(engine, target, drafter, tuple(context.args), engine_python, not no_check, not no_plugin, share_gpus)
    screen = _Json(quiet=log is not None) if as_json else _Terminal(quiet=log is not None)
    try:
        with screen.waiting("checking"):
            found = plan(asked)
        screen.planned(found, dry_run)
        if dry_run:
            return
        check_free(found)
        with screen.waiting("preparing") as progress:
            found = prepare(found, progress)
    except DoesNotFitError as error:
        screen.unfit(error.report)
        raise
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_appending(log)) if log is not None else None
        ended = _follow(found, file, screen)
    raise typer.Exit(_end(found, ended, screen))


def _appending(log: Path) -> BinaryIO:
    try:
        return log.expanduser().open("ab", buffering=0)
    except OSError as error:
        raise UsageError(f"--log {log} cannot be written: {error}") from error


def _follow(found: Plan, file: BinaryIO | None, screen: _Terminal | _Json) -> Ended:
    from eyas.bridges.following import Ended, Ready, Server
    from eyas.bridges.launch import plugin_said

    environment = {**found.environment, **found.variables}
    with Server(found.command, environment, found.signs, found.address, file) as server, screen.live():
        for event in server.events():
            if isinstance(event, Ended):
                return event
            if isinstance(event, Ready):
                screen.ready(found, server.pid, event.seconds, plugin_said(found))
            else:
                screen.event(event)
    raise AssertionError("the last event of a server is its end")


def _end(found: Plan, ended: Ended, screen: _Terminal | _Json) -> int:
    from eyas.bridges.launch import exit_code, explain, forget, plugin_said

    why = explain(found, ended) if ended.failed else None
    screen.ended(found, ended, why, None if ended.was_ready else plugin_said(found))
    forget(found)
    return exit_code(ended)


class _Terminal:
    """The engine's log and what Eyas has to say on stderr; on stdout one line, when the server answers."""

    def __init__(self, quiet: bool):
        self._quiet, self._out = quiet, console(stderr=True)
        self._bars: Progress | None = None

    def waiting(self, what: str) -> Any:
        return progress(what, always=False)

    def unfit(self, report: Report) -> None:
        from eyas.cli.fit import show_report

        show_report(report)

    def planned(self, found: Plan, only: bool) -> None:
        for note in remarks(found):
            notice(note)
        if only:
            print(clean(found.line))
        else:
            self._say(f"starting {found.source.label}: {found.line}")

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        from rich import progress

        columns = (progress.SpinnerColumn(), "{task.description}", progress.BarColumn(), progress.TimeElapsedColumn())
        with progress.Progress(
            *columns,
            console=self._out,
            transient=True,
            disable=not self._out.is_terminal,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as self._bars:
            self._task = self._bars.add_task("starting", total=None)
            yield

    def event(self, event: Event) -> None:
        from eyas.bridges.following import Line, Stage, Stopping

        assert self._bars is not None
        if isinstance(event, Line) and not self._quiet:
            self._out.print(clean(event.text), soft_wrap=True)
        elif isinstance(event, Stage):
            total = None if event.done is None else 1.0
            self._bars.update(self._task, description=event.what, total=total, completed=event.done or 0.0)
            if self._quiet and not self._out.is_terminal and event.done in (None, 1.0):
                self._out.print(f"{event.what} ...")
        elif isinstance(event, Stopping):
            self._say(f"{_signal(event.signal)} was passed on to the engine; a second one kills it")

    def ready(self, found: Plan, pid: int, seconds: float, said: Said | None) -> None:
        assert self._bars is not None
        self._bars.stop()
        print(f"ready after {seconds:.1f} s: {found.address.url} ({found.source.label}, process {pid})", flush=True)
        self._plugin(said)

    def ended(self, found: Plan, ended: Ended, why: Diagnosis | None, said: Said | None) -> None:
        label = found.source.label
        if ended.left:
            self._say(f"ended what {label} left behind: {', '.join(ended.left)}")
        if why is None:
            after = f"after {ended.seconds:.1f} s, with exit code {ended.code}"
            self._say(f"{label} {'stopped' if ended.was_ready else 'was stopped before it was ready'} {after}")
            return
        self._plugin(said)
        shown = ended.traceback or "\n".join(ended.tail[-_TAIL:] if self._quiet else ())
        if shown:
            self._out.print(f"\n{clean(shown)}\n", soft_wrap=True)
        hung = ", and did not end by itself" if ended.hung else ""
        error_line(f"{label} failed after {ended.seconds:.1f} s{hung}: {why.what}\nfix: {why.fix}")

    def _plugin(self, said: Said | None) -> None:
        if said is not None:
            (self._say if said.proved else notice)(said.text)

    def _say(self, text: str) -> None:
        self._out.print(clean(text), soft_wrap=not self._out.is_terminal)


class _Json:
    """One JSON object an event on stdout; the engine's log on stderr, where it does not go to a file."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._err = quiet, console(stderr=True)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[Any]:
        yield lambda what, done: _emit("stage", what=what, done=done)

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        yield

    def unfit(self, report: Report) -> None:
        from eyas.cli.fit import report_record

        _emit("unfit", check=report_record(report))

    def planned(self, found: Plan, only: bool) -> None:
        _emit("plan", **as_record(found))

    def event(self, event: Event) -> None:
        from eyas.bridges.following import Line, Stage, Stopping

        if isinstance(event, Line) and not self._quiet:
            self._err.print(clean(event.text), soft_wrap=True)
        elif isinstance(event, Stage):
            _emit("stage", what=event.what, done=event.done)
        elif isinstance(event, Stopping):
            _emit("stopping", signal=_signal(event.signal))

    def ready(self, found: Plan, pid: int, seconds: float, said: Said | None) -> None:
        _emit("ready", seconds=seconds, url=found.address.url, pid=pid, plugin=asdict(said) if said else None)

    def ended(self, found: Plan, ended: Ended, why: Diagnosis | None, said: Said | None) -> None:
        shown = asdict(ended) | {"tail": ended.tail[-_TAIL:]}
        diagnosis, plugin = asdict(why) if why else None, asdict(said) if said else None
        _emit("end", failed=ended.failed, diagnosis=diagnosis, plugin=plugin, **shown)


def _emit(event: str, **record: Any) -> None:
    print_json({"event": event, **record})


def remarks(found: Plan) -> list[str]:
    """What was decided, and what is put right on the way."""
    supplied = [f"the plugin puts this right: {problem.evidence}" for problem in found.supplied]
    if (conversion := found.conversion) is None:
        return [*supplied, *found.notes]
    why = "; ".join(problem.evidence for problem in conversion.why)
    before, after = conversion.dialects
    done = "was converted earlier" if conversion.place.is_dir() else "is converted"
    return [f"the drafter {done} from the dialect {before} to {after}, since {why}", *supplied, *found.notes]


def as_record(found: Plan) -> dict[str, Any]:
    from eyas.cli.fit import report_record

    conversion = found.conversion
    return {
        "engine": found.source.name,
        "version": found.source.version,
        "command": found.command,
        "variables": dict(found.variables),
        "url": found.address.url,
        "plugin": found.plugin_asks or None,
        "check": report_record(found.report) if found.report else None,
        "supplied": [asdict(problem) for problem in found.supplied],
        "conversion": asdict(conversion) | {k: str(getattr(conversion, k)) for k in ("source", "place")}
        if conversion
        else None,
        "notes": found.notes,
    }


def _signal(number: int) -> str:
    import signal

    return signal.Signals(number).name
