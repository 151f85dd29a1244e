"""What was measured so far, a line for each of it: whatever kills a benchmark costs what is in the making."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas.bench.passes import BenchError, Level, Name, Pair, Pass
from eyas.core import UsageError

FORMAT = 2

Place = tuple[int, Level, str]  # round, level, task


class Entries:
    """Lines of JSON behind one that says what they belong to: ``settings`` are what a run must have in common with the
    one it goes on with. ``read`` are those of before.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resume: bool):
        self.path, self.read = path, list[dict[str, Any]]()
        check(path, resume)
        if resume:
            self._read(settings)
        else:
            self.write({"format": FORMAT, "settings": dict(settings)})

    def write(self, entry: Mapping[str, Any]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise BenchError(f"{self.path} cannot be written ({error.strerror}): what it holds is kept.") from error

    def _read(self, settings: Mapping[str, Any]) -> None:
        whole, end, cut = self.path.read_bytes().rpartition(b"\n")
        entries = []
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                entries.append(json.loads(line))
            except ValueError as error:
                raise BenchError(f"{self.path}, line {number} is damaged: start anew with another --out.") from error
        if not entries or not isinstance(entries[0], dict) or entries[0].get("format") != FORMAT:
            raise BenchError(f"{self.path} is no journal of this version of Eyas: choose another --out.")
        _same(self.path, entries[0]["settings"], json.loads(json.dumps(settings)))
        if cut:  # in the middle of a line: what follows begins one of its own
            os.truncate(self.path, len(whole + end))
        self.read = entries[1:]


class Journal:
    """Passes, and the pairs that they make."""

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resume: bool):
        self.path, self.pairs, self.interrupted = path, dict[Place, Pair](), 0
        self._open: dict[Place, list[Pass]] = {}
        self._entries = Entries(path, settings, resume=resume)
        for entry in self._entries.read:
            if "pass" in entry:
                self._take(Pass.from_record(entry["pass"]), entry["complete"])
            else:
                self._open.clear()

    def add(self, done: Pass, *, complete: bool = True) -> None:
        """A pass that broke off is kept, and counts for nothing."""
        self._entries.write({"pass": done.as_record(), "complete": complete})
        self._take(done, complete)

    def begin(self) -> None:
        """Pairs are made of passes that follow one another: a new pair begins, whatever came before it."""
        self._entries.write({"pair": len(self.pairs)})
        self._open.clear()

    def _take(self, done: Pass, complete: bool) -> None:
        if not complete:
            self.interrupted += len(done.good)
            return
        place = (done.turn, done.level, done.task)
        passes = self._open.setdefault(place, [])
        passes.append(done)
        found: dict[Name, Pass] = {one.side: one for one in passes}
        if len(found) == 2:
            self.pairs[place] = Pair(found["without"], found["with"], tuple(one.side for one in passes))
            del self._open[place]


class Memo:
    """Plain JSON values by key, each worked out once."""

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resume: bool):
        self._entries = Entries(path, settings, resume=resume)
        self.values: dict[str, Any] = {entry["key"]: entry["value"] for entry in self._entries.read}

    def keep(self, key: str, value: Any) -> None:
        self._entries.write({"key": key, "value": value})
        self.values[key] = value


def check(path: Path, resume: bool) -> None:
    """Raises UsageError where a journal is there that is not to be gone on with, or is not there and should be."""
    if path.exists() and not resume:
        raise UsageError(f"{path} is there already: go on with it (--resume), or choose another --out.")
    if resume and not path.exists():
        raise UsageError(f"There is nothing to resume: {path} does not exist.")


def _same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name in (*before, *now):
        if (one := before.get(name)) != (other := now.get(name)):
            raise UsageError(
                f"{path} was begun with another {name.replace('_', ' ')} ({one!r}, now {other!r}): give the same, or "
                "choose another --out."
            )
