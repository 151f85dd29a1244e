"""What an engine lacks for a target, written into its installed source: for those who must have it there.

Next to a changed file lie its original and a record of both, so that it can be restored byte for byte, and is not
where somebody else has changed it since. The record is written first and removed last: it finds the original. Where
nothing that was added is in the file, as after an upgrade of the engine or a kill before it was written, there is
nothing to restore, and the two are removed.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from eyas.bridges.changes import Change
from eyas.bridges.code.classes import Classes
from eyas.bridges.code.source import ENGINES, EngineSource, collector_paused, roots
from eyas.bridges.sglang import patch as sglang
from eyas.bridges.target import Target
from eyas.bridges.vllm import patch as vllm
from eyas.core import EyasError, UsageError
from eyas.files import whole

ORIGINAL, RECORD = ".eyas-original", ".eyas-patch.json"


@dataclass(frozen=True)
class Edit:
    """One file of the engine, ``name`` as the engine calls it, before and after; ``what``: the changes, in words."""

    file: Path
    name: str
    before: bytes
    after: bytes
    what: tuple[str, ...]

    @property
    def original(self) -> Path:
        return self.file.with_name(self.file.name + ORIGINAL)

    @property
    def record(self) -> Path:
        return self.file.with_name(self.file.name + RECORD)

    @property
    def added(self) -> list[str]:
        """The passages that the patch adds, each as it stands in the file."""
        before, after = _lines(self.before), _lines(self.after)
        blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        passages = ["".join(after[start:end]) for tag, _, _, start, end in blocks if tag in ("insert", "replace")]
        return [passage for passage in passages if passage.strip()]

    def diff(self) -> str:
        after = f"{self.name} (patched)"
        return "".join(difflib.unified_diff(_lines(self.before), _lines(self.after), self.name, after))


def _lines(content: bytes) -> list[str]:
    return content.decode("utf-8", "replace").splitlines(keepends=True)


@contextmanager
def alone(source: EngineSource) -> Iterator[None]:
    """Nobody else patches or restores this engine meanwhile. Raises EyasError where somebody does already."""
    package = _root(source) / source.name
    descriptor = os.open(package, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise EyasError(f"another eyas patch is at work in {package}: wait until it has ended") from error
        yield
    finally:
        os.close(descriptor)


def missing(source: EngineSource, target: Target) -> list[Change]:
    """What has to be written. Raises CannotPatchError where that would not help."""
    with collector_paused():
        return (sglang if source.name == "sglang" else vllm).changes(Classes(source), target)


def plan(source: EngineSource, target: Target) -> list[Edit]:
    """The files to change for ``target``. Nothing is written.

    Raises UsageError for what is no installed engine or is patched already, CannotPatchError for what cannot be
    patched, and EyasError without libcst.
    """
    root = _root(source)
    needed = missing(source, target)
    modules = list(dict.fromkeys(change.module for change in needed))
    patched = patched_files(source)
    for file in (root / module for module in modules):
        if file in patched:
            raise UsageError(f"{file} is patched already; eyas patch --revert restores it first")
    if not needed:
        said = f"; patched by eyas: {', '.join(map(str, patched))}" if patched else ""
        raise UsageError(f"{source.label} lacks nothing for {target.architecture}: there is nothing to patch{said}")
    return [_edit(root / module, module, [c for c in needed if c.module == module]) for module in modules]


def _root(source: EngineSource) -> Path:
    """The folder that holds the engine's package."""
    if source.place.is_file():
        raise UsageError(f"{source.place} is a wheel; a patch is for an installed engine or a source tree")
    return next(root for root in roots(source.place) if (root / ENGINES[source.name]).is_dir())


def _edit(file: Path, name: str, changes: Sequence[Change]) -> Edit:
    try:
        from eyas.bridges.rewriting import rewrite
    except ImportError as error:
        raise EyasError("eyas patch needs libcst, which is not installed: pip install 'eyas[patch]'") from error
    before = file.read_bytes()
    return Edit(file, name, before, rewrite(before, changes, name), tuple(change.what for change in changes))


def apply(edits: Sequence[Edit]) -> None:
    """Writes all of them, each at once, behind its record and its original.

    Nothing stays changed where one cannot be written.
    """
    for edit in edits:
        if edit.file.read_bytes() != edit.before:
            raise EyasError(f"{edit.file} was changed while it was looked at; nothing was written")
    done: list[Edit] = []
    try:
        for edit in edits:
            done.append(edit)
            hashes = {"before": _hash(edit.before), "after": _hash(edit.after)}
            said = {"file": edit.name, "what": edit.what, "sha256": hashes, "added": edit.added}
            _write(edit.record, (json.dumps(said, indent=2) + "\n").encode(), edit.file)
            _write(edit.original, edit.before, edit.file)
            _write(edit.file, edit.after, edit.file)
            _forget_bytecode(edit.file)
    except BaseException:
        for edit in done:
            _restore(edit.file, edit.before)
        raise


def patched_files(source: EngineSource) -> list[Path]:
    """The files of an engine that are patched, or were about to be."""
    found = (_root(source) / source.name).rglob(f"*{RECORD}")
    return sorted(record.with_name(record.name.removesuffix(RECORD)) for record in found)


def drop_stale(source: EngineSource) -> list[Path]:
    """Forgets the patches of files that hold nothing of them, and says which these are."""
    found = [file for file in patched_files(source) if _is_stale(file)]
    for file in found:
        _forget_patch(file)
    return found


def _is_stale(file: Path) -> bool:
    if not file.is_file():
        return False  # its original can still be put there
    record, content = _Record.read(file), file.read_bytes()
    text = content.decode("utf-8", "replace")
    return _hash(content) != record.after and not any(passage in text for passage in record.added)


def revert(files: Sequence[Path]) -> None:
    """Restores all of them or, where one was changed since or its original is gone, none. Raises EyasError."""
    originals = {file: _original(file) for file in files}
    for file, content in originals.items():
        _restore(file, content)


@dataclass(frozen=True)
class _Record:
    """What was written beside a patched file: hashes of both, and the passages that were added."""

    before: str
    after: str
    added: tuple[str, ...]

    @staticmethod
    def read(file: Path) -> _Record:
        """Raises EyasError for what is none."""
        record = file.with_name(file.name + RECORD)
        try:
            said = json.loads(record.read_text(encoding="utf-8"))
            return _Record(str(said["sha256"]["before"]), str(said["sha256"]["after"]), tuple(map(str, said["added"])))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise EyasError(
                f"{record} is no record of a patch, and has to be removed by hand; nothing was restored"
            ) from error


def _original(file: Path) -> bytes:
    record, kept = _Record.read(file), file.with_name(file.name + ORIGINAL)
    content = kept.read_bytes() if kept.is_file() else b""
    if _hash(content) != record.before:
        raise EyasError(f"{kept} is not what {file.name} was before the patch; nothing was restored")
    if file.is_file() and _hash(file.read_bytes()) not in (record.before, record.after):
        raise EyasError(
            f"{file} was changed after it was patched; nothing was restored. Its original is {kept}: put it back by "
            f"hand, or keep the file and remove {kept.name} and {file.name + RECORD}"
        )
    return content


def _restore(file: Path, content: bytes) -> None:
    if not file.is_file() or file.read_bytes() != content:
        _write(file, content, file)
    _forget_patch(file)
    _forget_bytecode(file)


def _forget_patch(file: Path) -> None:
    for ending in (ORIGINAL, RECORD):
        file.with_name(file.name + ending).unlink(missing_ok=True)


def _write(path: Path, content: bytes, like: Path) -> None:
    """All of it or nothing, with the permissions of ``like``; a hard link elsewhere keeps what it had."""
    with whole(path) as draft:
        draft.write_bytes(content)
        if like.exists():
            shutil.copymode(like, draft)


def _forget_bytecode(file: Path) -> None:
    """What Python versions have compiled of it: they check its date and size, but not all of them always do."""
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
