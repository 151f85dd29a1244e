"""What went wrong, from an engine's log: its own traceback, and what that means."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_BEGINS = "Traceback (most recent call last):"
_CHAINED = re.compile("^(During handling of the above exception|The above exception was the direct cause)")
_RAISED = re.compile(r"[\w.]*(Error|Exception|Interrupt|Exit)\b(?=:|$)|(\w+\.py|\w+): error: ")
_POINTS_BACK = re.compile(r"(root cause|stack trace|error messages) above|(above\)?|stack trace) for (the )?root cause")
_MOST_LINES = 400  # of one traceback; a recursion has a thousand
_MOST = 50  # tracebacks: a server may log one for each bad request, and for months


@dataclass(frozen=True)
class Known:
    """A failure as the log shows it. ``what`` and ``fix`` may name groups of ``pattern`` as ``\\g<name>``."""

    pattern: str
    what: str
    fix: str


@dataclass(frozen=True)
class Diagnosis:
    what: str
    fix: str


# Of both engines. What they say themselves comes first in a search, so these are only what is left.
COMMON = (
    Known(
        r"(?P<why>eyas-plugin: .+)",
        r"\g<why>",
        "eyas check TARGET --drafter D --engine ... says what the model inside the wrapper lacks",
    ),
    Known(
        r"unrecognized arguments: (?P<flags>.+)",
        r"the engine knows no \g<flags>",
        "leave it out, or look for its name in this version's --help",
    ),
    Known(
        r"error: argument (?P<flag>[^:]+): (?P<why>.+)",
        r"the engine refuses \g<flag>: \g<why>",
        "correct the flag",
    ),
    Known(
        r"\[Errno 98\]|[Aa]ddress already in use",
        "a port was taken while the engine started",
        "take another --port, or end whoever holds it",
    ),
    Known(
        r"OutOfMemoryError|CUDA out of memory|hipErrorOutOfMemory",
        "the GPU's memory does not suffice for weights, drafter and KV cache together",
        "lower the share for the KV cache (SGLang: --mem-fraction-static, vLLM: --gpu-memory-utilization), the length, "
        "or the number of running requests; or spread the target over more GPUs",
    ),
    Known(
        r"No space left on device",
        "a disk or /dev/shm is full",
        "make room; in a container give /dev/shm more (docker run --shm-size 16g, or --ipc host)",
    ),
    Known(
        r"(?m)^(?P<what>(ModuleNotFoundError|ImportError): .+)",  # where it ended something, not in a warning
        r"the engine's environment is not whole: \g<what>",
        "repair or remake that environment; --engine-python chooses another one",
    ),
    Known(
        r"SafetensorError: (?P<why>.+)",
        r"a file of weights is not whole: \g<why>",
        "compare the sizes of the target's and the drafter's files with where they came from, and fetch them again",
    ),
    Known(
        r"CUDA driver version is insufficient|no CUDA-capable device|Found no NVIDIA driver|No CUDA GPUs are available",
        "PyTorch finds no GPU that it can use",
        "check nvidia-smi, CUDA_VISIBLE_DEVICES and the driver's version",
    ),
    Known(
        r"NCCL error|ncclUnhandledCudaError|ncclSystemError",
        "the GPUs cannot talk to each other (NCCL)",
        "NCCL_DEBUG=INFO names the reason; in a container give /dev/shm more",
    ),
)


def diagnose(known: Iterable[Known], texts: Iterable[str]) -> Diagnosis | None:
    """The first failure that is known, in the first of ``texts`` that shows one."""
    known = tuple(known)
    for text in texts:
        for failure in known:
            if found := re.search(failure.pattern, text):
                return Diagnosis(*(" ".join(found.expand(text).split()) for text in (failure.what, failure.fix)))
    return None


def failing_lines(lines: Iterable[str], header: re.Pattern[str], fatal: re.Pattern[str]) -> list[str]:
    """The lines of a log by which an engine says that it fails: not those that hold a user's text.

    Both engines log a request as one line with a header, and its text as Python writes a string.
    """
    found = []
    for line in lines:
        before = header.match(line)
        message = line[before.end() :] if before else line
        error = before is not None and before.groupdict().get("level") in ("ERROR", "CRITICAL")
        if error or fatal.match(message) or _RAISED.match(message):
            found.append(line)
    return found


class Tracebacks:
    """Picks tracebacks from a log whose lines several processes write.

    ``header`` matches what is in front of a message, with the group ``process`` where it says whose it is. A line that
    does not say goes with the one before. The last ones are kept, and behind the mark the first ones.
    """

    def __init__(self, header: re.Pattern[str]):
        self._header, self._open, self._last = header, dict[str, _Block](), ""
        self._blocks: list[_Block] = []
        self._first: int | None = None

    def mark(self) -> None:
        """From here on the engine is known to be failing: the next traceback is of the root cause."""
        if self._first is None:
            self._first = len(self._blocks)

    def forget(self) -> None:
        """What was shown so far did not end it."""
        self._open.clear()
        self._blocks.clear()
        self._first = None

    def feed(self, line: str) -> None:
        found = self._header.match(line)
        process = (found["process"] if found else None) or self._last
        message = line[found.end() :] if found else line
        self._last = process
        block = self._open.get(process)
        if message.rstrip().endswith(_BEGINS):  # a prompt in a log goes on behind it, in quotes
            if block is None or not block.chained:
                block = self._open[process] = _Block()
                self._keep(block)
            block.add(_BEGINS)
        elif block is not None and not block.add(message):
            del self._open[process]

    def _keep(self, block: _Block) -> None:
        if self._first is None:
            self._blocks = [*self._blocks[1 - _MOST :], block]
        elif len(self._blocks) < self._first + _MOST:
            self._blocks.append(block)

    def root(self) -> str:
        """The traceback that tells why: the first one since the mark, without one the last; "" where there is none."""
        if not self._blocks:
            return ""
        first = self._first
        index = first if first is not None and first < len(self._blocks) else len(self._blocks) - 1
        while index > 0 and _POINTS_BACK.search(self._blocks[index].end):
            index -= 1
        return self._blocks[index].text()


class _Block:
    """One traceback: its first lines and its last ones."""

    def __init__(self) -> None:
        self._head, self._rest, self._more = list[str](), deque[str](maxlen=_MOST_LINES // 2), 0
        self._raised = False  # its last line, the exception, was there
        self.chained, self.end = False, ""  # of the last line that says anything

    def add(self, line: str) -> bool:
        """Whether the line belongs here."""
        said, plain = bool(line.strip()), not line.startswith((" ", "\t"))
        chained = bool(_CHAINED.match(line))
        if line == _BEGINS:
            self._raised = False
        elif self._raised and said and plain and not chained:
            return False
        elif said and plain:
            self._raised = not chained
        if said:
            self.chained, self.end = chained, line
        self._put(line)
        return True

    def _put(self, line: str) -> None:
        if len(self._head) < _MOST_LINES // 2:
            self._head.append(line)
        else:
            self._more += len(self._rest) == self._rest.maxlen
            self._rest.append(line)

    def text(self) -> str:
        between = [f"  ... {self._more} more lines ..."] if self._more else []
        return "\n".join([*self._head, *between, *self._rest]).rstrip()


def exception_of(traceback: str) -> str:
    """The line that names the exception, "" where there is none."""
    lines: Sequence[str] = traceback.splitlines()
    return next((line for line in reversed(lines) if line.strip() and not line.startswith((" ", "\t"))), "")
