"""What went wrong, from an engine's log: its own traceback, and what that means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_BEGINS = "Traceback (most recent call last):"
_CHAINED = re.compile("^(During handling of the above exception|The above exception was the direct cause)")
_POINTS_BACK = re.compile("(root cause|stack trace|error messages) above|above for the root cause")
_MOST_LINES = 400  # of one traceback; a recursion has a thousand


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


class Tracebacks:
    """Picks tracebacks from a log whose lines several processes write.

    ``header`` matches what is in front of a message, with the group ``process`` where it says whose it is. A line that
    does not say goes with the one before.
    """

    def __init__(self, header: re.Pattern[str]):
        self._header, self._open, self._last = header, dict[str, _Block](), ""
        self._blocks: list[_Block] = []
        self._first: int | None = None

    def mark(self) -> None:
        """From here on the engine is known to be failing: the next traceback is of the root cause."""
        if self._first is None:
            self._first = len(self._blocks)

    def feed(self, line: str) -> None:
        found = self._header.match(line)
        process = (found["process"] if found else None) or self._last
        message = line[found.end() :] if found else line
        self._last = process
        block = self._open.get(process)
        if _BEGINS in message:
            if block is None or not block.chained:
                block = self._open[process] = _Block()
                self._blocks.append(block)
            block.add(_BEGINS)
        elif block is not None and not block.add(message):
            del self._open[process]

    def root(self) -> str:
        """The traceback that tells why: the first one since the mark, without one the last; "" where there is none."""
        if not self._blocks:
            return ""
        first = self._first
        index = first if first is not None and first < len(self._blocks) else len(self._blocks) - 1
        while index > 0 and _POINTS_BACK.search(self._blocks[index].lines[-1]):
            index -= 1
        return self._blocks[index].text()


class _Block:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._raised = False  # its last line, the exception, was there

    @property
    def chained(self) -> bool:
        said = [line for line in self.lines if line.strip()]
        return bool(said) and bool(_CHAINED.match(said[-1]))

    def add(self, line: str) -> bool:
        """Whether the line belongs here."""
        if line == _BEGINS:
            self._raised = False
        elif self._raised and line.strip() and not line.startswith((" ", "\t")) and not _CHAINED.match(line):
            return False
        elif line.strip() and not line.startswith((" ", "\t")):
            self._raised = not _CHAINED.match(line)
        self.lines.append(line)
        return True

    def text(self) -> str:
        kept = self.lines
        if len(kept) > _MOST_LINES:
            half = _MOST_LINES // 2
            kept = [*kept[:half], f"  ... {len(kept) - 2 * half} more lines ...", *kept[-half:]]
        return "\n".join(kept).rstrip()


def exception_of(traceback: str) -> str:
    """The line that names the exception, "" where there is none."""
    lines: Sequence[str] = traceback.splitlines()
    return next((line for line in reversed(lines) if line.strip() and not line.startswith((" ", "\t"))), "")
