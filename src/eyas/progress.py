"""What is being done, for whoever waits. On stderr only: a machine may be reading stdout."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Report = Callable[[str, "float | None"], None]  # (what is being done, how much of it is done from 0 to 1, if known)
PATIENCE = 2.0  # seconds that need no explanation


@dataclass(frozen=True)
class _Display:
    console: Console
    report: Report


# A terminal has one line for this: what is done within a call that shows its progress is shown in the same place.
_around: ContextVar[_Display | None] = ContextVar("_around", default=None)


@contextmanager
def on_stderr(live: bool = True) -> Iterator[Report]:
    """A live bar on a terminal (unless not ``live``), one line per step elsewhere. Within another one, that one."""
    from rich import progress

    if (display := _around.get()) is not None:
        yield display.report
        return
    console = _console()
    live = live and console.is_terminal
    text = progress.TextColumn("{task.description}", markup=False)
    columns = (progress.SpinnerColumn(), text, progress.BarColumn(), progress.TimeElapsedColumn())
    with progress.Progress(  # left alone, it would take what is printed to stdout meanwhile to stderr
        *columns, console=console, transient=True, disable=not live, redirect_stdout=False, redirect_stderr=False
    ) as bars:
        task = bars.add_task("", total=None)
        shown = ""

        def report(what: str, done: float | None) -> None:
            nonlocal shown
            if what != shown:
                bars.reset(task)
                if not live:
                    console.print(f"{what} ...", soft_wrap=not console.is_terminal)
            shown = what
            bars.update(task, description=what, total=None if done is None else 1.0, completed=done or 0.0)

        token = _around.set(_Display(console, report))
        try:
            yield report
        finally:
            _around.reset(token)


@contextmanager
def if_slow(what: str, live: bool = True) -> Iterator[None]:
    """Says ``what`` as ``on_stderr`` does, but only once it has taken ``PATIENCE`` seconds."""
    if (display := _around.get()) is not None:
        display.report(what, None)
        yield
        return
    over = threading.Event()

    def show() -> None:
        if not over.wait(PATIENCE):
            with on_stderr(live) as report:
                report(what, None)
                over.wait()

    waiting = threading.Thread(target=show, name="eyas-progress", daemon=True)
    waiting.start()
    try:
        yield
    finally:
        over.set()
        waiting.join()


@contextmanager
def without_bars() -> Iterator[None]:
    """transformers counts what it reads and writes in bars of its own: not meanwhile. Its settings are back after."""
    from transformers.utils import logging

    before = logging.set_tqdm_hook(lambda bar, args, given: bar(*args, **{**given, "disable": True}))
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def note(message: str) -> None:
    """A line that stays, above whatever is shown live."""
    from rich.text import Text

    display = _around.get()
    console = _console() if display is None else display.console
    # wrapped at words on a terminal, one line for whoever searches a log
    console.print(Text.assemble(("note: ", "bold yellow"), message), soft_wrap=not console.is_terminal)


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, markup=False, emoji=False, highlight=False)
