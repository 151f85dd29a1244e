"""A folder that appears whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from eyas.core import UsageError


def check_free(out: Path, source: Path, force: bool, ours: Collection[str]) -> None:
    """Raises UsageError where writing ``out`` would lose something: only a folder of the files ``ours`` is replaced."""
    if source.resolve() == out.resolve() or out.resolve() in source.resolve().parents:
        raise UsageError(f"{out}: holds the source; name another folder")
    if not out.is_dir():
        if out.exists() or out.is_symlink():
            raise UsageError(f"{out}: exists and is not a folder")
        return
    held = sorted(path.name for path in out.iterdir())
    foreign = [name for name in held if name not in ours]
    if foreign:
        raise UsageError(f"{out}: holds {foreign[0]}, which is not of a conversion; empty it or name another folder")
    if held and not force:
        raise UsageError(f"{out}: exists already; --force replaces it")


@contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """A temporary folder beside ``out`` that takes its name in the end, and its place if there is one.

    A killed process leaves the temporary folder, never half of ``out``; the next one removes it.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    work, lock = _work_folder(out)
    try:
        new = work / "new"
        new.mkdir()
        yield new
        _flush(new)
        if out.is_dir():
            out.rename(work / "old")
        try:
            new.rename(out)
        except OSError:
            if (work / "old").is_dir():
                (work / "old").rename(out)
            raise
        _flush(out.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        _unlock(lock)


def _work_folder(out: Path) -> tuple[Path, int | None]:
    """A new folder, locked. Locks end with their process, so a folder without one is of a process that died.

    The parent is locked meanwhile: nobody must find the new folder before its lock.
    """
    prefix = f".{out.name}.part-"
    parent = _lock(out.parent, wait=True)
    try:
        for stale in out.parent.glob(f"{prefix}*"):
            if (free := _lock(stale)) is not None:
                shutil.rmtree(stale, ignore_errors=True)
                _unlock(free)
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
        return work, _lock(work)
    finally:
        _unlock(parent)


def _lock(folder: Path, wait: bool = False) -> int | None:
    """A descriptor that holds the folder's lock, or None where it cannot be had (in use, or a disk without locks)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def _flush(folder: Path) -> None:
    """Names are on disk too: a power cut must not undo a rename that was reported."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
