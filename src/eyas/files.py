"""Files and folders that are there whole or not at all, and JSON read from those of others."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from eyas.core import EyasError


def write_whole(path: Path, content: str | bytes) -> None:
    """``content`` in place of what ``path`` held, as ``whole`` does it."""
    with whole(path) as draft:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content, indent=2) + "\n")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to, for one writer at a time.

    In the end it is on the disk, and then takes the place of ``path``. Where the block or the disk fails, ``path``
    keeps what it held; a killed process leaves ``.NAME.part`` beside it.
    """
    draft = path.with_name(f".{path.name}.part")
    try:
        yield draft
        flush(draft)  # content before name
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    flush(path.parent)


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside ``out`` that takes its name in the end, and its place if there is one.

    A killed process leaves the temporary folder, never half of ``out``; the next one removes it.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    work, lock = _work_folder(out)
    try:
        new = work / "new"
        new.mkdir()
        yield new
        for path in (*new.rglob("*"), new):
            flush(path)
        if out.is_dir():
            out.rename(work / "old")
        try:
            new.rename(out)
        except OSError:
            if (work / "old").is_dir():
                (work / "old").rename(out)
            raise
        flush(out.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        _unlock(lock)


def flush(path: Path) -> None:
    """A file's content, or a folder's names, for good: a power cut must not undo what was reported."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(file: Path, error: type[EyasError], missing: str = "", limit: int = 10_000_000) -> dict[str, Any]:
    """The object in a file of at most ``limit`` bytes. Raises ``error`` for anything else."""
    if not file.is_file():
        raise error(f"{file}: missing" + (missing and f"; {missing}"))
    try:
        if (size := file.stat().st_size) > limit:
            raise error(f"{file}: {size} bytes is too much for this file")
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as reason:
        raise error(f"{file}: cannot be read: {reason.strerror}") from reason
    except (ValueError, RecursionError) as reason:
        raise error(f"{file}: not valid JSON: {reason}") from reason
    if not isinstance(content, dict):
        raise error(f"{file}: expected a JSON object, found {type(content).__name__}")
    return content


def _work_folder(out: Path) -> tuple[Path, int | None]:
    """A new folder, locked. Locks end with their process, so a folder without one is of a process that died.

    The parent is locked meanwhile: nobody must find the new folder before its lock.
    """
    prefix = f".{out.name}.part-"
    parent = _lock(out.parent, wait=True)
    try:
        for stale in out.parent.glob(f"{glob.escape(prefix)}*"):
            if (free := _lock(stale)) is not None:
                shutil.rmtree(stale, ignore_errors=True)
                _unlock(free)
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
        return work, _lock(work)
    finally:
        _unlock(parent)


def _lock(folder: Path, wait: bool = False) -> int | None:
    """A descriptor that holds the folder's lock, or None where it cannot be had (in use, gone, or no locks here)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _unlock(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)
