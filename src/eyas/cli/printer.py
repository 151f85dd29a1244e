"""Who shows answers: a terminal, or JSON lines, with the same methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TypeAlias

from eyas.cli.console import progress
from eyas.core import Request

if TYPE_CHECKING:
    from eyas.cli.records import JsonLines
    from eyas.cli.render import Terminal
    from eyas.engine.sequence import Output

    Printer: TypeAlias = Terminal | JsonLines

Listen = Callable[["Output"], None]


@contextmanager
def waiting(request: Request, write: Listen | None = None, *, streams: bool = False) -> Iterator[Listen]:
    """Hands outputs to ``write``, and gives a sign of life on stderr: to the end, or until the answer ``streams``."""
    with ExitStack() as life:
        report = life.enter_context(progress(f"reading {len(request.prompt_ids)} tokens", always=False))
        made = 0

        def listen(output: Output) -> None:
            nonlocal made
            made += len(output.emitted)
            if streams:
                life.close()
            else:
                report("decoding", made / request.sampling.max_tokens)
            if write is not None:
                write(output)

        yield listen
