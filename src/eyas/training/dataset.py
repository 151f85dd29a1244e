"""Training data on disk: Parquet shards of token ids and loss masks, and a manifest that says whose they are.

A shard appears whole, under its final name. What has not filled one yet is in a journal beside it, a line for each
piece of work, so that whatever kills the writer costs the pieces in the making only, and a restart knows the others.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock, Timeout

from eyas import __version__
from eyas.core import EyasError, UsageError, one_line
from eyas.files import whole, write_json

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

FORMAT = 1
MANIFEST = "manifest.json"
META = b"eyas"  # the key of a shard's own facts among its schema's metadata
SHARD_ROWS = 512
GROUP_ROWS = 128  # of a row group: what is decoded at once where rows are read in random order
GROUPS_KEPT = 512

# Encoded to tell tokenizers apart that have the same tokens: merges, digits, spaces and case are all in it.
PROBE = "The falcon's 1,234 dives\n\n    def f(x):\treturn x**2  # naïve Ünïcødé 日本語 🦅 don't   stop"


class DataError(EyasError):
    """Training data is not what it should be, or cannot be made."""


@dataclass(frozen=True)
class Row:
    """One conversation: ``ids`` int32 [n], ``mask`` bool [n], True where the target wrote the token."""

    ids: np.ndarray
    mask: np.ndarray
    source: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """What a data set is made of, and by whom. ``recipe`` is what a restart must not change; ``dropped`` by reason."""

    target: str
    vocab_size: int
    tokenizer_hash: str = ""
    template_hash: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    rows: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    eyas_version: str = __version__
    recipe: dict[str, Any] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    diversity: dict[str, Any] = field(default_factory=dict)
    complete: bool = False
    format: int = FORMAT

    @classmethod
    def of(cls, target: str, tokenizer: Any, vocab_size: int, **more: Any) -> Manifest:
        """The manifest of data made with this tokenizer and its chat template."""
        return cls(target, vocab_size, tokenizer_hash(tokenizer), template_hash(tokenizer), **more)

    def check_target(self, tokenizer: Any, vocab_size: int) -> None:
        """Raises DataError for a target whose tokens or chat template are not those the data was made with."""
        what = f"The data was made for {self.target}"
        again = "make data for this target (eyas data), or train that one"
        if vocab_size != self.vocab_size:
            raise DataError(f"{what}, which has {self.vocab_size:,} tokens; this target has {vocab_size:,}: {again}.")
        if (found := tokenizer_hash(tokenizer)) != self.tokenizer_hash:
            raise DataError(
                f"{what} with another tokenizer (hash {self.tokenizer_hash[:12] or 'none'}, this target's is "
                f"{found[:12] or 'none'}), so its token ids mean something else: {again}."
            )
        if (found := template_hash(tokenizer)) != self.template_hash:
            raise DataError(
                f"{what} with another chat template (hash {self.template_hash[:12] or 'none'}, this target's is "
                f"{found[:12] or 'none'}), so served conversations would look different: {again}."
            )


def tokenizer_hash(tokenizer: Any) -> str:
    """Of what a tokenizer does (its tokens by id, and how it splits a probe), not of how its files are spelt."""
    if tokenizer is None:
        return ""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    probe = [int(i) for i in tokenizer(PROBE, add_special_tokens=False)["input_ids"]]
    return hashlib.sha256(json.dumps([tokens, probe]).encode()).hexdigest()


def template_hash(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest() if template else ""


class Dataset:
    """Data for reading. Rows are decoded as they are asked for; their lengths are known without reading them."""

    def __init__(self, folder: Path, manifest: Manifest, shards: Sequence[Shard]):
        self.folder, self._shards = folder, list(shards)
        self.manifest = count(manifest, self._shards)
        self._ends = np.cumsum([len(shard.lengths) for shard in self._shards], dtype=np.int64)
        self._groups = lru_cache(maxsize=GROUPS_KEPT)(self._read_group)

    @classmethod
    def open(cls, folder: str | Path) -> Dataset:
        """Raises DataError for anything that is missing, damaged or not what the manifest says.

        Data that is still being made can be read as far as its shards go.
        """
        require_pyarrow()
        folder = Path(folder).expanduser()
        manifest = read_manifest(folder)
        made = cls(folder, manifest, [Shard.open(path) for path in shard_paths(folder)])
        if manifest.complete and made.manifest.rows != manifest.rows:
            raise DataError(
                f"{folder} should hold {manifest.rows:,} rows and holds {made.manifest.rows:,}: shards are missing or "
                "were replaced; restore them, or make the data again."
            )
        if not len(made):
            raise DataError(f"{folder} holds no rows yet: let `eyas data` finish at least one shard.")
        return made

    @cached_property
    def lengths(self) -> np.ndarray:
        """int32 [rows], tokens of each row."""
        return np.concatenate([shard.lengths for shard in self._shards])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Row:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        shard = int(np.searchsorted(self._ends, index, side="right"))
        within = index - (int(self._ends[shard - 1]) if shard else 0)
        return self._groups(shard, within // GROUP_ROWS)[within % GROUP_ROWS]

    def __iter__(self) -> Iterator[Row]:
        for index in range(len(self)):
            yield self[index]

    def _read_group(self, shard: int, group: int) -> list[Row]:
        return self._shards[shard].rows(group, self.manifest.vocab_size)


@dataclass(frozen=True)
class Shard:
    """One Parquet file and the facts it carries about itself."""

    path: Path
    lengths: np.ndarray  # int32 [rows]
    loss_tokens: int
    sources: dict[str, int]
    done: tuple[str, ...]  # the pieces of work that are settled with it, rows or not
    dropped: dict[str, int]

    @classmethod
    def open(cls, path: Path) -> Shard:
        file = _parquet(path)
        try:
            facts = json.loads((file.schema_arrow.metadata or {})[META])
            made = cls(
                path,
                np.asarray(facts["lengths"], np.int32),
                int(facts["loss_tokens"]),
                dict(facts["sources"]),
                tuple(facts["done"]),
                dict(facts["dropped"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} was not written by `eyas data`: its own facts are missing ({error}).") from error
        if len(made.lengths) != file.metadata.num_rows:
            raise DataError(f"{path} says {len(made.lengths)} rows and has {file.metadata.num_rows}: it is damaged.")
        return made

    def rows(self, group: int, vocab_size: int) -> list[Row]:
        try:
            table = _parquet(self.path).read_row_group(group)
            ids, masks = _lists(table["input_ids"]), _lists(table["loss_mask"])
            sources, provenances = table["source"].to_pylist(), table["provenance"].to_pylist()
            rows = [
                Row(i.astype(np.int32, copy=False), m.astype(bool, copy=False), source, json.loads(provenance))
                for i, m, source, provenance in zip(ids, masks, sources, provenances, strict=True)
            ]
        except Exception as error:  # pyarrow's errors have no common base: bad pages, columns that are not there
            raise DataError(f"{self.path} cannot be read: it is damaged ({one_line(error)}).") from error
        for number, row in enumerate(rows, start=group * GROUP_ROWS):
            if problem := row_problem(row, vocab_size):
                raise DataError(f"{self.path}, row {number}: {problem}.")
        return rows


def require_pyarrow() -> None:
    """Raises DataError where it is not installed: before the work, not when its result is to be written."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise DataError("Training data needs pyarrow: install the extra eyas[train].") from error


def _parquet(path: Path) -> pq.ParquetFile:
    require_pyarrow()
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, page_checksum_verification=True)
    except Exception as error:
        raise DataError(f"{path} cannot be read: it is damaged or no Parquet file ({one_line(error)}).") from error


def _lists(column: pa.ChunkedArray) -> list[np.ndarray]:
    array = column.combine_chunks()
    values = array.flatten().to_numpy(zero_copy_only=False)  # flatten, not values: a slice keeps its neighbours' there
    return np.split(values, np.cumsum(array.value_lengths().to_numpy())[:-1]) if len(array) else []


def row_problem(row: Row, vocab_size: int) -> str:
    """Why a row cannot be trained on; empty where it can."""
    ids, mask = row.ids, row.mask
    if ids.ndim != 1 or ids.shape != mask.shape or not len(ids):
        return f"token ids {list(ids.shape)} and loss mask {list(mask.shape)} must be two lists of one length, above 0"
    if ids.min() < 0 or ids.max() >= vocab_size:
        return f"token ids must be in [0, {vocab_size}), found {int(ids.min())} to {int(ids.max())}"
    if not mask.any():
        return "no token is the target's, so there is nothing to learn from it"
    return ""


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if not path.is_file():
        what = "is no folder" if not folder.is_dir() else f"has no {MANIFEST}"
        raise DataError(f"{folder} is no training data: it {what}; `eyas data TARGET --out {folder}` makes some.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = {f.name for f in fields(Manifest)}
        if unknown := sorted(set(content) - known):
            raise DataError(f"{path} holds an unknown key {unknown[0]!r}: it was written by a newer Eyas, or by hand.")
        manifest = Manifest(**content)
    except (ValueError, TypeError, OSError) as error:
        raise DataError(f"{path} is damaged: {error}.") from error
    if manifest.format != FORMAT:
        raise DataError(f"{path} has format {manifest.format!r}, this Eyas reads {FORMAT}: update Eyas.")
    return manifest


def count(manifest: Manifest, shards: Sequence[Shard]) -> Manifest:
    """The manifest with the counts of these shards."""
    sources, dropped = Counter[str](), Counter[str]()
    for shard in shards:
        sources.update(shard.sources)
        dropped.update(shard.dropped)
    return replace(
        manifest,
        rows=sum(len(shard.lengths) for shard in shards),
        tokens=sum(int(shard.lengths.sum()) for shard in shards),
        loss_tokens=sum(shard.loss_tokens for shard in shards),
        sources=dict(sorted(sources.items())),
        dropped=dict(sorted(dropped.items())),
    )


def shard_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("data-*.parquet"))


class DatasetWriter:
    """Data in the making. Opening a folder that has been begun goes on with it; ``done`` says what is settled there.

    One process at a time. Raises UsageError for a folder that holds something else, or was begun with another recipe.
    """

    def __init__(self, folder: str | Path, manifest: Manifest, *, shard_rows: int = SHARD_ROWS):
        require_pyarrow()
        self.folder, self._shard_rows = Path(folder).expanduser(), shard_rows
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(self.folder)
        self._manifest = self._begin(manifest)
        for stale in self.folder.glob(".*.part"):
            stale.unlink()
        self._shards = [Shard.open(path) for path in shard_paths(self.folder)]
        self._pieces = self._recover()  # of the shard that is next
        self.done = {item for shard in self._shards for item in shard.done} | {piece.item for piece in self._pieces}
        self._journal = self._open_journal()

    @property
    def manifest(self) -> Manifest:
        """With the counts up to now, what is in the journal included."""
        return count(self._manifest, [*self._shards, _summary(self._journal_path(), self._pieces)])

    @property
    def conversations(self) -> int:
        """Pieces of work that came to something."""
        lost = sum(sum(shard.dropped.values()) for shard in self._shards)
        return len(self.done) - lost - sum(piece.dropped is not None for piece in self._pieces)

    def rows(self) -> Iterator[Row]:
        """All rows there are, those in the journal included."""
        for shard in self._shards:
            for group in range(-(-len(shard.lengths) // GROUP_ROWS)):
                yield from shard.rows(group, self._manifest.vocab_size)
        for piece in self._pieces:
            yield from piece.rows

    def append(self, rows: Iterable[Row], item: str | None = None, dropped: str | None = None) -> None:
        """Adds the rows of one piece of work, all of them or none, whatever happens.

        ``item`` names the piece, and a second one of a name is refused. ``dropped`` says why there are no rows. Raises
        DataError for a row that cannot be trained on.
        """
        rows = list(rows)
        item = item if item is not None else f"row:{len(self.done)}"
        if item in self.done:
            raise DataError(f"{self.folder} holds {item} already.")
        for row in rows:
            if problem := row_problem(row, self._manifest.vocab_size):
                raise DataError(f"{item} cannot be written to {self.folder}: {problem}.")
        piece = Piece(item, tuple(rows), dropped)
        self._write_down(piece.line())
        self._pieces.append(piece)
        self.done.add(item)
        if sum(len(p.rows) for p in self._pieces) >= self._shard_rows:
            self._write_shard()

    def finish(self, **diversity: Any) -> Dataset:
        """Writes the last shard and the manifest. More may be appended later by opening the folder again."""
        if self._pieces:
            self._write_shard()
        done = replace(count(self._manifest, self._shards), complete=True, diversity=diversity)
        write_json(self.folder / MANIFEST, asdict(done))
        self.close()
        return Dataset.open(self.folder)

    def close(self) -> None:
        """Stops without finishing: what there is becomes a shard, and the next time goes on from there."""
        if self._journal.closed:
            return
        try:
            if self._pieces:
                self._write_shard()
            self._journal.close()
            self._journal_path().unlink()
        finally:
            self._lock.release()

    def _begin(self, manifest: Manifest) -> Manifest:
        """Puts an unfinished manifest into the folder. UsageError where there is something it does not fit."""
        if not (self.folder / MANIFEST).is_file():
            if foreign := sorted(p.name for p in self.folder.iterdir() if not p.name.startswith(".")):
                raise UsageError(f"{self.folder} holds {foreign[0]}, which is no training data; name another folder.")
        else:
            _check_same(self.folder, read_manifest(self.folder), manifest)
        manifest = replace(manifest, complete=False, diversity={})
        write_json(self.folder / MANIFEST, asdict(manifest))
        return manifest

    def _journal_path(self) -> Path:
        return self.folder / f"data-{len(self._shards):05}.jsonl"

    def _recover(self) -> list[Piece]:
        """The pieces in the journal. One that belongs to a shard that is there already is of no use any more."""
        current = self._journal_path()
        for journal in self.folder.glob("data-*.jsonl"):
            if journal != current:
                journal.unlink()
        if not current.is_file():
            return []
        content = current.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]  # a line that was being written is a piece that never was
        if len(whole) < len(content):
            os.truncate(current, len(whole))
        try:
            return [Piece.read(line) for line in whole.splitlines()]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{current} is damaged ({error}); remove it, and its rows are made again.") from error

    def _write_shard(self) -> None:
        path = self.folder / f"data-{len(self._shards):05}.parquet"
        shard = _summary(path, self._pieces)
        _write_table(path, [row for piece in self._pieces for row in piece.rows], shard)
        self._journal.close()
        self._journal_path().unlink()
        self._shards.append(shard)
        self._pieces = []
        self._journal = self._open_journal()

    def _open_journal(self) -> FileIO:
        return FileIO(self._journal_path(), "ab")  # unbuffered: what is written is the system's, which nothing kills

    def _write_down(self, line: bytes) -> None:
        """A whole line or, on a full disk, none."""
        size = self._journal.seek(0, os.SEEK_END)  # behind a line that failed, tell() is not where the file ends
        try:
            while line:
                line = line[self._journal.write(line) :]
        except OSError as error:
            self._journal.truncate(size)
            raise DataError(
                f"{self._journal_path()} cannot be written: {error.strerror}. What was made before is kept; make room "
                "and give the same command again."
            ) from error


@dataclass(frozen=True)
class Piece:
    """One piece of work as the journal has it."""

    item: str
    rows: tuple[Row, ...]
    dropped: str | None

    def line(self) -> bytes:
        rows = [
            {
                "ids": row.ids.tolist(),
                "mask": row.mask.astype(int).tolist(),
                "source": row.source,
                "provenance": row.provenance,
            }
            for row in self.rows
        ]
        return json.dumps({"item": self.item, "rows": rows, "dropped": self.dropped}).encode() + b"\n"

    @classmethod
    def read(cls, line: bytes) -> Piece:
        content = json.loads(line)
        rows = [
            Row(np.asarray(r["ids"], np.int32), np.asarray(r["mask"], bool), r["source"], r["provenance"])
            for r in content["rows"]
        ]
        return cls(content["item"], tuple(rows), content["dropped"])


def _locked(folder: Path) -> FileLock:
    """A lock that ends with its process."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(f"Another process is writing to {folder}: wait for it, or name another folder.") from None
    return lock


def _check_same(folder: Path, there: Manifest, wanted: Manifest) -> None:
    """UsageError where going on would mix two data sets."""
    for name in ("target", "vocab_size", "tokenizer_hash", "template_hash", "sampling", "recipe"):
        old, new = getattr(there, name), getattr(wanted, name)
        if isinstance(old, Mapping) and isinstance(new, Mapping) and old != new:
            key = next(k for k in sorted({*old, *new}) if old.get(k) != new.get(k))
            name, old, new = key, old.get(key), new.get(key)
        if old != new:
            raise UsageError(
                f"{folder} was begun with {name} {_short(old)}, and now it is {_short(new)}: say the same again to go "
                "on, or name another folder."
            )


def _summary(path: Path, pieces: Sequence[Piece]) -> Shard:
    rows = [row for piece in pieces for row in piece.rows]
    return Shard(
        path,
        np.asarray([len(row.ids) for row in rows], np.int32),
        sum(int(row.mask.sum()) for row in rows),
        dict(Counter(row.source for row in rows)),
        tuple(piece.item for piece in pieces),
        dict(Counter(piece.dropped for piece in pieces if piece.dropped)),
    )


def _write_table(path: Path, rows: Sequence[Row], shard: Shard) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    facts = {
        "lengths": shard.lengths.tolist(),
        "loss_tokens": shard.loss_tokens,
        "sources": shard.sources,
        "done": shard.done,
        "dropped": shard.dropped,
    }
    columns = {
        "input_ids": (pa.list_(pa.int32()), [row.ids for row in rows]),
        "loss_mask": (pa.list_(pa.bool_()), [row.mask for row in rows]),
        "source": (pa.string(), [row.source for row in rows]),
        "provenance": (pa.string(), [json.dumps(row.provenance) for row in rows]),
    }
    schema = pa.schema([(name, kind) for name, (kind, _) in columns.items()], metadata={META: json.dumps(facts)})
    table = pa.table([pa.array(values, kind) for kind, values in columns.values()], schema=schema)
    try:
        with whole(path) as draft:
            pq.write_table(table, draft, row_group_size=GROUP_ROWS, compression="zstd", write_page_checksum=True)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error}. What it was to hold is in a journal beside it; make room and give the "
            "same command again."
        ) from error


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
