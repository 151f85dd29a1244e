"""Files made to be misread: each is one clear refusal, in little time and memory."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.core import CheckpointError
from eyas.drafter.checkpoint import Checkpoint, read_header


def safetensors(path: Path, header: dict, size: int = 16) -> Path:
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(size))
    return path


def entry(first: object, last: object, shape: list | None = None) -> dict:
    return {"dtype": "F32", "shape": shape or [2], "data_offsets": [first, last]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(0, 8), "b": entry(4, 12)},
        {"a": entry(0, 8), "b": entry(0, 8)},
        {"a": entry(8, 16)},
        {"a": entry(0.0, 8.0)},
        {"a": entry(0, 8, [2.0]), "b": entry(8, 16)},
        {"a": 5},
        {"a": entry(0, 16, [4]), "d2t": entry(16, 16, [0, 10**25])},
        {"a": entry(0, 16, [4]), "d2t": entry(16, 16, [2**40, 0, 2**40])},
        {"a": entry(0, 16, [4]), "d2t": entry(16, 16, [0] * 100)},
    ],
    ids=[
        *("overlap", "twice the same", "hole", "fractions", "fractional shape", "no entry"),
        *("endless beside nothing", "endless in all", "endless shape"),
    ],
)
def test_headers_that_lie_about_their_values(tmp_path: Path, header: dict) -> None:
    with pytest.raises(CheckpointError, match="fetch it again"):
        read_header(safetensors(tmp_path / "model.safetensors", header))


def folder(path: Path, **config: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("content", [os.urandom(500), b"", b"PK\x03\x04", b"\x80\x02."])
def test_garbage_for_a_pickle(tmp_path: Path, content: bytes) -> None:
    (folder(tmp_path) / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "value", [{5: torch.ones(1)}, {"a": torch.ones(2, device="meta")}, {"a": torch.ones(2).to_sparse()}], ids=str
)
def test_pickled_tensors_of_odd_kinds(tmp_path: Path, value: dict) -> None:
    torch.save(value, folder(tmp_path) / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="dictionary of tensors"):
        Checkpoint.open(tmp_path)


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(folder(tmp_path) / "model.safetensors")
    with pytest.raises(CheckpointError, match="found no weights"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("weight_map", [{"a": 5}, {"a": ["x"]}, {"a": "b", "c": 1}, [], None])
def test_an_index_of_anything_but_names(tmp_path: Path, weight_map: object) -> None:
    (folder(tmp_path) / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path)


def test_a_map_that_is_an_archive(tmp_path: Path) -> None:
    safetensors(folder(tmp_path) / "model.safetensors", {"a": entry(0, 8), "b": entry(8, 16)})
    with (tmp_path / "d2t.npy").open("wb") as stream:
        np.savez(stream, d2t=np.zeros(2))
    with pytest.raises(CheckpointError, match="archive"):
        Checkpoint.open(tmp_path)
