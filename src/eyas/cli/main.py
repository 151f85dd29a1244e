"""The command line: one verb per module, and every way of failing in one place."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from eyas import __version__
from eyas.cli import bench, check, convert, data, eval, launch, patch, plan, probe, run, serve, train, tune
from eyas.cli.console import INTERRUPTED, error_line
from eyas.cli.options import Debug
from eyas.core import EyasError

_HOMELESS = "Could not determine home directory."  # pathlib's, wherever a path with ~ is followed

app = typer.Typer(
    name="eyas",
    help="EAGLE-3 speculative decoding that works on the first try and says honestly whether it pays.",
    epilog="Try: eyas run smollm2 'Why do falcons dive?'   eyas COMMAND --help shows examples",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run.run)
app.command()(serve.serve)
app.command(context_settings={"allow_extra_args": True})(check.check)
app.command()(convert.convert)
app.command(context_settings=launch.SETTINGS)(launch.launch)
app.command()(patch.patch)
app.command(context_settings=probe.SETTINGS)(probe.probe)
app.command()(data.data)
app.command()(train.train)
app.command("eval")(eval.evaluate)
app.command(context_settings={"allow_extra_args": True})(bench.bench)
app.command(context_settings={"allow_extra_args": True})(tune.tune)
app.command()(plan.plan)


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"eyas {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Debug = False,
) -> None:
    pass


def main(args: Sequence[str] | None = None) -> None:
    """Runs one command and exits: 0 done, 1 failed, 2 asked for something that cannot be, 130 interrupted."""
    args = sys.argv[1:] if args is None else list(args)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a character that a terminal cannot show or send is no reason to stop
            stream.reconfigure(errors="replace")
    try:
        app(args, prog_name="eyas")
    except SystemExit as leaving:
        if leaving.code == INTERRUPTED and sys.stderr.isatty():
            print(file=sys.stderr)  # the shell's prompt goes on a line of its own
        raise
    except (EyasError, OSError) as error:
        fail(str(error), error.exit_code if isinstance(error, EyasError) else 1, "--debug" in args)
    except Exception as error:
        if str(error) == _HOMELESS:
            named = next((arg for arg in args if "~" in arg), "~")
            fail(f"{named}: no home folder is known for it; write the path out, or set HOME", 2, "--debug" in args)
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        fail(f"internal error: {what} (run again with --debug for the traceback)", 1, "--debug" in args)


def fail(message: str, code: int, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    error_line(message)
    sys.exit(code)
