"""A conversation on the terminal, or line by line from a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING

from eyas.cli.console import error_line
from eyas.cli.prompts import Asking, stdin_is_terminal
from eyas.core import EyasError, SamplingParams

if TYPE_CHECKING:
    from eyas.cli.printer import Printer
    from eyas.engine.llm import LLM
    from eyas.engine.sequence import Output

PROMPT = "> "
HELP = "(/reset starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer)"


class Chat:
    def __init__(self, llm: LLM, printer: Printer, params: SamplingParams, asking: Asking, *, speculate: bool = True):
        self.llm, self.printer, self.params, self.asking, self.speculate = llm, printer, params, asking, speculate
        self.messages = asking.opening()
        self.images = asking.images  # they go with the first message

    def run(self, first: Sequence[str] = ()) -> None:
        """Answers ``first``, then what is typed. From a pipe, the first failure ends it."""
        if stdin_is_terminal():
            print(HELP, file=sys.stderr)
        for line in first:
            self.turn(line)
        while (said := ask()) is not None and said.strip() != "/exit":
            if said.strip() == "/reset":
                self.messages, self.images = self.asking.opening(), self.asking.images
                print("(all forgotten)", file=sys.stderr)
            elif said.strip() == "/help":
                print(HELP, file=sys.stderr)
            elif said.strip():
                self.turn(said)

    def turn(self, said: str) -> None:
        """One question and its answer, both remembered, however far the answer got."""
        messages = [*self.messages, self.asking.message(said, self.images)]
        heard: list[str] = []
        try:
            request = self.llm.request(messages, self.params, speculate=self.speculate)
            with self.printer.following(request) as listen, Interruptible() as interruptible:

                def on_output(output: Output) -> None:
                    heard.append(output.text)
                    listen(output)
                    interruptible.check()

                completion = self.llm.complete(request, on_output)
            self.printer.answer(said, request, completion)
        except KeyboardInterrupt:
            self.printer.stopped(said, "".join(heard))
        except EyasError as error:
            if not stdin_is_terminal():
                raise
            return error_line(str(error))
        self.messages, self.images = [*messages, {"role": "assistant", "content": "".join(heard)}], ()


class Interruptible:
    """Ctrl-C takes effect at the next ``check``, where nothing is half-done; a second one at once."""

    def __enter__(self) -> Interruptible:
        self.asked = False
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        if self.asked:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def ask() -> str | None:
    """The next line without its end; None at the end of input."""
    if sys.stdin is None:
        return None
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            return edited_line()
        if sys.stdin.isatty():
            print(PROMPT, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        print(f"\n{HELP}", file=sys.stderr)
        return ""
    return line.rstrip("\r\n") if line else None


def edited_line() -> str | None:
    """With history and cursor keys, where the system has readline."""
    with suppress(ImportError):
        import readline  # noqa: F401
    try:
        return input(PROMPT)
    except EOFError:
        print(file=sys.stderr)
        return None
