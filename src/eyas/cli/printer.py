"""What every way of printing answers can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol

from eyas.cli.console import progress
from eyas.core import Request

if TYPE_CHECKING:
    from eyas.engine.llm import Completion
    from eyas.engine.lossless import Comparison
    from eyas.engine.sequence import Output

Listen = Callable[["Output"], None]


class Printer(Protocol):
    def following(self, request: Request) -> AbstractContextManager[Listen]:
        """Whoever hears an answer's outputs as they come."""

    def answer(self, text: str, request: Request, completion: Completion) -> None:
        """The answer to ``text`` is complete."""

    def stopped(self, text: str, answer: str) -> None:
        """The answer to ``text`` was stopped when it had got as far as ``answer``."""

    def comparison(self, place: tuple[int, int], text: str, comparison: Comparison) -> None:
        """``text``, number ``place[0]`` of ``place[1]``, was decoded both ways."""

    def total(self, texts: Sequence[str], comparisons: Sequence[Comparison]) -> None: ...


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
