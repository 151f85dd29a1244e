"""The two ways out: stdout for what was asked for, stderr for everything else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from eyas.progress import Report

INTERRUPTED = 130  # the exit code of what Ctrl-C ended
# What could move the cursor, set colours or rename the window: models and checkpoints are not to be trusted with it.
_CONTROL = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def console(stderr: bool = False) -> Console:
    """A console that takes every string as it is: no markup, no emoji names, no highlighting."""
    from rich.console import Console

    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def clean(text: str) -> str:
    """``text`` without control characters: what a terminal may be given."""
    return text.replace("\r\n", "\n").translate(_CONTROL)


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def error_line(message: str) -> None:
    from rich.text import Text

    err = console(stderr=True)  # wrapped at words on a terminal, one line for whoever searches a log
    err.print(Text.assemble(("error: ", "bold red"), clean(message)), soft_wrap=not err.is_terminal)


def notice(message: str) -> None:
    from eyas.progress import note

    note(clean(message))


@contextmanager
def progress(what: str, always: bool = True) -> Iterator[Report]:
    """On a terminal a spinner with the time; elsewhere a line per step, or nothing unless ``always``."""
    from eyas.progress import on_stderr

    if not always and not console(stderr=True).is_terminal:
        yield lambda what, done: None
        return
    with on_stderr() as report:
        report(what, None)
        yield report


def quiet_libraries() -> None:
    """What transformers and torch remark while they load is of no use to whoever wants an answer."""
    import warnings

    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
