"""Weights written to one safetensors file byte by byte: no value is interpreted, so none can change, and no torch."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eyas.core import CheckpointError
from eyas.drafter.checkpoint import ITEM_BYTES, Checkpoint
from eyas.files import flush

_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Entry:
    """One tensor to write. ``dtype`` is safetensors' name; ``pieces`` gives its bytes, in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    pieces: Callable[[], Iterable[memoryview]]


def copied(checkpoint: Checkpoint, original: str, name: str) -> Entry:
    """The checkpoint's tensor ``original`` under another name."""
    tensor = checkpoint.tensors[original]
    return Entry(name, tensor.dtype, tensor.shape, tensor.nbytes, lambda: checkpoint.raw(original))


def made(name: str, values: np.ndarray[Any, Any]) -> Entry:
    """A vocabulary map, d2t or t2d."""
    dtype = {"d2t": "I64", "t2d": "BOOL"}[name]
    return Entry(name, dtype, values.shape, values.nbytes, lambda: [memoryview(values.tobytes())])


def main_dtype(entries: Iterable[Entry]) -> str:
    """torch's name of the type of most weights, as engines that cast to one type shall."""
    sizes: Counter[str] = Counter()
    for entry in entries:
        if entry.dtype in _TORCH_NAMES:
            sizes[entry.dtype] += entry.nbytes
    return _TORCH_NAMES[sizes.most_common(1)[0][0]]


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
    flush(file)
    return digests
