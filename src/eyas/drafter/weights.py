"""Weights written to one safetensors file byte by byte: no value is interpreted, so none can change, and no torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.core import CheckpointError
from eyas.drafter.checkpoint import ITEM_BYTES


@dataclass(frozen=True)
class Entry:
    """One tensor to write. ``dtype`` is safetensors' name; ``pieces`` gives its bytes, in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    pieces: Callable[[], Iterable[memoryview]]


def write(file: Path, entries: Sequence[Entry]) -> dict[str, str]:
    """The SHA-256 of each tensor's bytes, by name, after all of them are on disk.

    The layout is that of the safetensors library: wide types first, so that every tensor lies aligned.
    """
    ordered = sorted(entries, key=lambda entry: (-ITEM_BYTES[entry.dtype], entry.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in ordered:
        span = [end, end + entry.nbytes]
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": span}
        end += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digests = {}
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for entry in ordered:
            digest, written = hashlib.sha256(), 0
            for piece in entry.pieces():
                out.write(piece)
                digest.update(piece)
                written += len(piece)
            if written != entry.nbytes:
                raise CheckpointError(f"{entry.name}: {written} bytes where {entry.nbytes} were expected")
            digests[entry.name] = digest.hexdigest()
        out.flush()
        os.fsync(out.fileno())
    return digests
