"""A drafter's files: config.json, and the names, types and shapes of its tensors without reading their values.

Nothing here imports torch except to open a pickled ``.bin``, and that only with ``weights_only``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas.core import CheckpointError
from eyas.files import read_json

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
_SPELLED = {  # torch's and numpy's names in those of safetensors
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip
_NUMPY = {"BOOL": "?", "U8": "u1", "I32": "<i4", "I64": "<i8"}
_MAX_HEADER = 100_000_000  # the limit of the safetensors format
_MOST_SIZES, _MOST_VALUES = 32, 1 << 60  # numpy can count no more, not even beside a size of 0
NO_CONFIG = "a drafter needs its config.json beside the weights"
_PIECE = 1 << 24  # bytes copied at a time
_SHOWN = 8  # problems listed in one error: it must fit a screen
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies. ``dtype`` is safetensors' name ("BF16"), ``start`` the first byte of its values."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Checkpoint:
    """One drafter on disk. ``tensors`` has the names in the files; maps may be ``.npy`` files beside them."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    pickled: Mapping[str, torch.Tensor] = field(default_factory=dict, repr=False)  # a .bin's values, mapped from disk

    @staticmethod
    def open(path: str | Path) -> Checkpoint:
        """Reads config and headers of a folder, or of one weights file with config.json beside it.

        Raises CheckpointError naming the file for anything missing, truncated, malformed, or pickled with code.
        """
        place = Path(path).expanduser()
        if not place.exists():
            raise CheckpointError(f"{place}: no such file; a drafter is a folder with config.json and weights")
        folder = place if place.is_dir() else place.parent
        config = read_json(folder / "config.json", CheckpointError, NO_CONFIG)
        tensors: dict[str, Tensor] = {}
        pickled: dict[str, torch.Tensor] = {}
        for file in _weight_files(place):
            if file.suffix == ".bin":
                values = _load_pickled(file)
                pickled |= values
                found = {name: _tensor(file, value) for name, value in values.items()}
            else:
                found = read_header(file)
            twice = sorted(found.keys() & tensors.keys())
            if twice:
                raise CheckpointError(f"{file}: {twice[0]} is also in {tensors[twice[0]].file.name}")
            tensors |= found
        for name in ("d2t", "t2d"):
            if name not in tensors and (folder / f"{name}.npy").is_file():
                tensors[name] = _tensor(folder / f"{name}.npy", _load_npy(folder / f"{name}.npy"))
        return Checkpoint(place, config, tensors, pickled)

    @property
    def folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    def array(self, name: str) -> np.ndarray:
        """The values of a vocabulary map (integers or bools), without torch unless they are in a .bin."""
        tensor = self.tensors[name]
        if name in self.pickled:
            return self.pickled[name].numpy()
        if tensor.file.suffix == ".npy":
            return _load_npy(tensor.file)
        return np.fromfile(tensor.file, _NUMPY[tensor.dtype], tensor.count, offset=tensor.start).reshape(tensor.shape)

    def raw(self, name: str) -> Iterator[memoryview]:
        """The bytes of any tensor as they are in memory and in safetensors files, piece by piece."""
        tensor = self.tensors[name]
        if name in self.pickled:
            yield from _pieces(_bytes_of(self.pickled[name]))
        elif tensor.file.suffix == ".npy":
            yield from _pieces(memoryview(_load_npy(tensor.file).tobytes()))
        else:
            yield from _read_pieces(tensor)

    def values(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and value of each named tensor, file by file."""
        from safetensors import SafetensorError, safe_open

        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.tensors[name].file, []).append(name)
        for file, members in by_file.items():
            if file.suffix == ".bin":
                yield from ((name, self.pickled[name]) for name in members)
                continue
            try:
                with safe_open(file, framework="pt") as opened:
                    yield from ((name, opened.get_tensor(name)) for name in members)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file}: cannot be read: {error}") from error


def refusal(path: Path, problems: list[str], verdict: str = "this drafter cannot be used here") -> CheckpointError:
    """One error for all that is wrong with the drafter at ``path``."""
    if len(problems) == 1:
        return CheckpointError(problems[0] if str(path) in problems[0] else f"{path}: {problems[0]}")
    lines = [f"  - {problem}" for problem in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        lines.append(f"  - and {len(problems) - _SHOWN} more")
    return CheckpointError("\n".join([f"{path}: {verdict}:", *lines]))


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file: 8 bytes of header length, the header as JSON, then the values.

    Raises CheckpointError where the header is malformed or the file is shorter or longer than the header says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise CheckpointError(
                f"{file}: not a whole safetensors file: its header claims {length} bytes, the file has {size}; "
                "fetch it again"
            )
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors, end = {}, 0
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = entry["data_offsets"]
            if not all(type(number) is int for number in (first, last, *entry["shape"])):
                raise TypeError(f"{name[:100]}: sizes and offsets are whole numbers")
            if first != end:
                raise CheckpointError(
                    f"{file}: {name[:100]}: its values should begin at {end}, its header entry spans {first}..{last}; "
                    "fetch it again"
                )
            if (dtype := entry["dtype"]) not in ITEM_BYTES:
                known = ", ".join(ITEM_BYTES)
                raise CheckpointError(f"{file}: {name[:100]} is of type {str(dtype)[:100]}; a drafter's are {known}")
            tensor = Tensor(file, dtype, tuple(entry["shape"]), 8 + length + first)
            if len(tensor.shape) > _MOST_SIZES or math.prod(filter(None, tensor.shape)) >= _MOST_VALUES:
                raise TypeError(f"{name[:100]}: no tensor has the shape {str(entry['shape'])[:100]}")
            if first < 0 or last - first != tensor.nbytes or min(tensor.shape, default=0) < 0:
                raise CheckpointError(
                    f"{file}: {name}: {tensor.dtype} {list(tensor.shape)} takes {tensor.nbytes} bytes, its header "
                    f"entry spans {first}..{last}"
                )
            tensors[name], end = tensor, last
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: its safetensors header cannot be read: {error!r}; fetch it again") from error
    if size != 8 + length + end:
        raise CheckpointError(
            f"{file}: expected {8 + length + end} bytes from its header, found {size}: truncated or damaged; "
            "fetch it again"
        )
    return tensors


def _weight_files(place: Path) -> list[Path]:
    """The files that hold the weights at ``place``, following an index to its shards."""
    if place.is_file():
        chosen = place
    else:
        known = [place / name for name in _WEIGHTS if (place / name).is_file()]
        others = [p for p in (*sorted(place.glob("*.safetensors")), *sorted(place.glob("*.bin"))) if p.is_file()]
        if not known and len(others) != 1:
            found = ", ".join(p.name for p in others) or "no weights"
            raise CheckpointError(f"{place}: expected model.safetensors or pytorch_model.bin, found {found}")
        chosen = known[0] if known else others[0]
    if chosen.name.endswith(".index.json"):
        shards = read_json(chosen, CheckpointError, limit=_MAX_HEADER).get("weight_map")
        names = sorted(set(map(str, shards.values()))) if isinstance(shards, dict) else []
        for name in names:
            if Path(name).name != name or not (chosen.parent / name).is_file():
                raise CheckpointError(f"{chosen}: names the shard {name!r}, which is not in the folder; fetch it again")
        if not names:
            raise CheckpointError(f"{chosen}: expected a weight_map from tensor to file, found none")
        return [chosen.parent / name for name in names]
    if chosen.suffix not in (".safetensors", ".bin"):
        raise CheckpointError(f"{chosen}: expected a .safetensors or .bin file")
    return [chosen]


def _load_pickled(file: Path) -> dict[str, torch.Tensor]:
    """A .bin's tensors. Unpickling may run code, so only plain tensors are let in."""
    import pickle

    import torch

    def plain(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu"

    def load(mapped: bool) -> Any:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)

    try:
        try:
            content = load(mapped=True)
        except RuntimeError:  # written before torch 1.6: not a zip archive, so it cannot be mapped
            content = load(mapped=False)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file}: holds something other than tensors, which could run code when opened; refused. "
            "Ask its publisher for a safetensors file"
        ) from error
    except Exception as error:  # garbage makes the unpickler stumble in every way there is
        raise CheckpointError(f"{file}: not a whole PyTorch file ({error}); fetch it again") from error
    if not isinstance(content, dict) or not all(isinstance(k, str) and plain(v) for k, v in content.items()):
        raise CheckpointError(f"{file}: expected a dictionary of tensors by name, found {type(content).__name__}")
    return content


def _read_pieces(tensor: Tensor) -> Iterator[memoryview]:
    left = tensor.nbytes
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        while left:
            piece = stream.read(min(left, _PIECE))
            if not piece:
                raise CheckpointError(f"{tensor.file}: ends before its header says: it was changed while being read")
            left -= len(piece)
            yield memoryview(piece)


def _pieces(whole: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(whole), _PIECE):
        yield whole[start : start + _PIECE]


def _bytes_of(value: torch.Tensor) -> memoryview:
    import torch

    return value.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _load_npy(file: Path) -> np.ndarray:
    try:
        array = np.load(file, allow_pickle=False)
    except Exception as error:  # a bad header may fail as a syntax error, or ask for more memory than there is
        raise CheckpointError(f"{file}: not a plain numpy array: {error}") from error
    if not isinstance(array, np.ndarray):
        raise CheckpointError(f"{file}: expected one numpy array, found an archive of them")
    return array


def _tensor(file: Path, value: torch.Tensor | np.ndarray) -> Tensor:
    kind = str(value.dtype).removeprefix("torch.")
    if kind not in _SPELLED:
        raise CheckpointError(f"{file}: values of type {kind} are not read")
    return Tensor(file, _SPELLED[kind], tuple(value.shape))
