"""The Chrome trace that PyTorch's profiler wrote of a serving engine, and where the time of its decode steps went."""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from eyas.bench.kernels import LABELS, Part, part_of
from eyas.bench.passes import BenchError

MOST = 1 << 28  # bytes of a trace, unpacked: a million events, and ten times as much memory
LONGEST = 10  # kernels that are named
DEVICE, HOST = ("kernel", "gpu_memcpy", "gpu_memset"), "cpu_op"
MARKS = ("gpu_user_annotation", "user_annotation")
# What engines call a forward pass of the target: vLLM (now and formerly), SGLang (which names its drafter's "DRAFT").
_FORWARD = re.compile(
    r"execute_(\d{1,9}_)?context_(?P<reading>\d{1,9})\(.*\)_generation_(?P<writing>\d{1,9})\("
    r"|execute_new_(?P<new>\d{1,9})_cached_(?P<cached>\d{1,9})"
    r"|step\[(?!DRAFT)(?P<stage>\w+)"
)
# Where several run at once, the time is theirs that compute, before those that only wait for data.
_LAST = {"allreduce": 1, "communication": 1, "copies": 2}
# What runs inside of these is part of them, whatever its name.
_WHOLE = ("attention", "moe", "allreduce", "communication", "sampling")


class TraceError(BenchError):
    """A trace is not there, cannot be read, or holds nothing that was asked for."""


class Event(NamedTuple):
    """``start`` and ``duration`` in microseconds. ``track``: process and thread, on a GPU device and stream."""

    kind: str
    name: str
    start: float
    duration: float
    track: tuple[str, str]

    @property
    def end(self) -> float:
        return self.start + self.duration


class Span(NamedTuple):
    """When something ran by itself, in microseconds."""

    start: float
    end: float
    part: Part
    name: str


@dataclass(frozen=True)
class Split:
    """``seconds`` of all that was looked at, by part, which add up to it; ``steps`` None where nothing counts them.

    ``longest``: the kernels that took longest, each with its part and its seconds.
    """

    device: str  # "GPU" or "CPU"
    seconds: dict[Part, float]
    steps: int | None
    longest: list[tuple[str, Part, float]]

    def as_record(self) -> dict[str, Any]:
        whole = sum(self.seconds.values())
        return {
            "device": self.device,
            "steps": self.steps,
            "seconds": {part: s / self.steps for part, s in self.seconds.items()} if self.steps else None,
            "shares": {part: s / whole for part, s in self.seconds.items()},
            "longest": [{"name": n, "part": p, "share": s / whole} for n, p, s in self.longest],
        }


# Reading


def read(path: Path) -> list[Event]:
    """Its kernels, operators and annotations. Raises TraceError for a file that is broken, or too long to be read."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            text = file.read(MOST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path} cannot be read: {error}.") from error
    if len(text) > MOST:
        raise TraceError(f"{path} has more than {MOST >> 20} MiB unpacked and is not read: open it in a viewer.")
    try:
        content = json.loads(text, object_hook=_kept)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is no trace of PyTorch's profiler, or was cut off: {error}.") from error
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list):
        raise TraceError(f"{path} is no trace of PyTorch's profiler: it has no list of traceEvents.")
    return [event for event in events if isinstance(event, Event)]


def _kept(found: dict[str, Any]) -> Any:
    """What is needed of a JSON object, while the file is read: millions of them would fill the memory."""
    if "traceEvents" in found:
        return found
    kind = found.get("cat")
    if found.get("ph") != "X" or kind not in (*DEVICE, HOST, *MARKS):
        return None
    try:
        start, duration = float(found["ts"]), float(found.get("dur", 0))
    except (TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"an event {str(found.get('name'))[:80]!r} has no time") from error
    if not (math.isfinite(start) and math.isfinite(duration)):
        raise ValueError(f"an event {str(found.get('name'))[:80]!r} lasts for ever")
    track = str(found.get("pid")), str(found.get("tid"))
    return Event(str(kind), str(found.get("name")), start, max(duration, 0.0), track)


# Taking it apart


def split(events: Sequence[Event], steps: int | None = None) -> Split:
    """Where the time went: between the beginnings of forward passes that only decode, where the engine marks its
    passes, else from the first kernel to the last, which are ``steps`` if the engine has counted them.

    Raises TraceError where nothing was computed, or no marked pass only decoded.
    """
    kernels = [event for event in events if event.kind in DEVICE]
    if kernels:
        device = _busiest((event.track[0], event.duration) for event in kernels)
        spans = [Span(e.start, e.end, part_of(e.name), e.name) for e in kernels if e.track[0] == device]
        marks = _marks(e for e in events if e.kind == MARKS[0] and e.track[0] == device)
        marks = marks if len(marks) > 1 else _marks(e for e in events if e.kind == MARKS[1])
    else:
        operators = [event for event in events if event.kind == HOST]
        if not operators:
            raise TraceError("nothing was computed while it was profiled.")
        thread = _busiest((event.track, event.duration) for event in operators)
        spans = list(exclusive(e for e in operators if e.track == thread))
        marks = _marks(e for e in events if e.kind == MARKS[1] and e.track == thread)
    windows = [(one.start, other.start) for one, other in pairwise(marks) if _decodes(one)]
    if marks and not windows:
        raise TraceError(f"it holds {len(marks)} forward passes, and no whole step that only decodes.")
    if windows:
        steps = len(windows)
    else:
        windows = [(min((s.start for s in spans), default=0.0), max((s.end for s in spans), default=0.0))]
    seconds = {part: time / 1e6 for part, time in shared(spans, windows).items()}
    if not sum(seconds.values()):
        raise TraceError("nothing in it takes any time.")
    return Split("GPU" if kernels else "CPU", seconds, steps, _longest(spans, windows))


def exclusive(events: Iterable[Event]) -> Iterator[Span]:
    """The events of one thread, which are nested, without what runs inside of them: nothing is counted twice."""
    open_: list[tuple[Event, Part]] = []
    at = -math.inf

    def until(end: float) -> Iterator[Span]:
        """What the innermost one has had to itself."""
        nonlocal at
        if open_ and end > at:
            yield Span(at, end, open_[-1][1], open_[-1][0].name)
        at = max(at, end)

    for event in sorted(events, key=lambda event: (event.start, -event.duration)):
        while open_ and open_[-1][0].end <= event.start:
            yield from until(open_[-1][0].end)
            open_.pop()
        yield from until(event.start)
        open_.append((event, _inside(part_of(event.name), open_[-1][1] if open_ else "other")))
    while open_:
        yield from until(open_[-1][0].end)
        open_.pop()


def _inside(part: Part, around: Part) -> Part:
    return around if around in _WHOLE or part == "other" else part


def shared(spans: Iterable[Span], windows: Sequence[tuple[float, float]]) -> dict[Part, float]:
    """Microseconds of the windows, which do not overlap, by part; idle where nothing runs.

    Where several run at once, on other streams, whatever computes comes before communication, and that before copies:
    what is hidden behind something else costs nothing. Among equals the time is shared.
    """
    ends: list[tuple[float, int, Part | None]] = [
        (at, change, None) for begin, end in windows for at, change in ((begin, 1), (end, -1))
    ]
    for span in spans:
        ends += [(span.start, 1, span.part), (span.end, -1, span.part)]
    ends.sort(key=lambda end: end[0])
    times = dict.fromkeys(LABELS, 0.0)
    running, inside, before = Counter[Part](), 0, 0.0
    for at, change, part in ends:
        if inside and at > before:
            for one, share in _first(running).items():
                times[one] += share * (at - before)
        before = at
        if part is None:
            inside += change
        else:
            running[part] += change
    return times


def _first(running: Counter[Part]) -> dict[Part, float]:
    """Whose time it is, and in which shares."""
    active = {part: count for part, count in running.items() if count > 0}
    if not active:
        return {"idle": 1.0}
    rank = min(_LAST.get(part, 0) for part in active)
    first = {part: count for part, count in active.items() if _LAST.get(part, 0) == rank}
    return {part: count / sum(first.values()) for part, count in first.items()}


def _marks(events: Iterable[Event]) -> list[Event]:
    """The forward passes of the target, in order; of one stream, where each that they use has marks of its own."""
    tracks: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        if _FORWARD.match(event.name):
            tracks.setdefault(event.track, []).append(event)
    most: list[Event] = max(tracks.values(), key=len, default=[])
    return sorted(most, key=lambda event: event.start)


def _decodes(mark: Event) -> bool:
    """Whether a pass reads no prompts."""
    found = _FORWARD.match(mark.name)
    assert found is not None
    if found["stage"]:
        return found["stage"] in ("DECODE", "VERIFY")
    reading, writing = (found["reading"], found["writing"]) if found["reading"] else (found["new"], found["cached"])
    return int(reading) == 0 and int(writing) > 0


def _busiest(times: Iterable[tuple[Any, float]]) -> Any:
    whole = Counter[Any]()
    for place, time in times:
        whole[place] += time  # type: ignore[assignment]
    return whole.most_common(1)[0][0]


def _longest(spans: Sequence[Span], windows: Sequence[tuple[float, float]]) -> list[tuple[str, Part, float]]:
    begins, times = [begin for begin, _ in windows], Counter[tuple[str, Part]]()
    for span in spans:
        place = bisect_right(begins, span.start) - 1
        if place >= 0 and span.start < windows[place][1]:
            times[span.name[:200], span.part] += (span.end - span.start) / 1e6  # type: ignore[assignment]
    return [(name, part, time) for (name, part), time in times.most_common(LONGEST)]
