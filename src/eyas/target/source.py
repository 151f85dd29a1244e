"""What a target's name means, decided before anything slow starts: a folder, a GGUF file, `smollm2`, or a hub id."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.core import TargetError, UsageError
from eyas.files import read_json
from eyas.target.smollm2 import smollm2_folder

MAX_INDEX = 100_000_000  # bytes: a trillion parameters take ten million


@dataclass(frozen=True)
class Source:
    """Where transformers shall read: ``place`` is a folder or a hub id, ``gguf`` one file in that folder."""

    place: str
    gguf: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)  # for every from_pretrained


def find_source(name: str) -> Source:
    """The one place ``name`` stands for, or an error that says where was looked."""
    if not name:
        raise UsageError("the target has no name; give a folder, a GGUF file, a hub id or smollm2")
    path = smollm2_folder() if name == "smollm2" else Path(name).expanduser()
    if path.is_dir():
        _check_folder(path)
        return Source(str(path))
    if path.suffix == ".gguf":
        _check_gguf(path)
        return Source(str(path.parent), gguf=path)
    if path.is_file():
        raise TargetError(f"{name!r} is a file, but neither a GGUF file nor a model folder")
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise TargetError(f"there is no folder {name!r} (looked at {path.absolute()})")
    return Source(name, options=_ask_hub(name, path))


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise TargetError(f"{folder} is not a model folder: it has no config.json{_what_else(folder)}")
    read_json(folder / "config.json", TargetError)
    for index in folder.glob("*.index.json"):
        shards = set(read_json(index, TargetError, limit=MAX_INDEX).get("weight_map", {}).values())
        if missing := sorted(shard for shard in shards if not (folder / shard).is_file()):
            raise TargetError(f"{folder} is incomplete: {index.name} lists {missing[0]}, which is not there")
    for file in sorted(folder.glob("*.safetensors")):
        _check_safetensors(file)


def _what_else(folder: Path) -> str:
    if ggufs := sorted(folder.glob("*.gguf")):
        return f"; to load a GGUF file, name the file itself, like {ggufs[0]}"
    if (folder / "adapter_config.json").is_file():
        return ", only an adapter; merge it into its base model and load the result"
    return ""


def _check_safetensors(file: Path) -> None:
    """The header says how long the file must be, so a truncated download shows without reading the weights."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise TargetError(f"{file} is damaged or truncated ({error}); download it again") from error


def _check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise TargetError(f"cannot read the GGUF file {path.absolute()}: {error.strerror}") from error
    if magic != b"GGUF":
        raise TargetError(f"{path} is not a GGUF file: it begins with {magic!r}")


def _ask_hub(name: str, path: Path) -> dict[str, Any]:
    """Options to load hub id ``name`` with. One quick question: transformers would retry for half a minute per file."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=10)
    except Exception as error:  # the network layer beneath has changed its errors more than once
        reason = _refusal(error)
        if reason is None and isinstance(try_to_load_from_cache(name, "config.json"), str):
            return {"local_files_only": True}
        reason = reason or f"is not in the Hugging Face cache, and the hub cannot be reached ({error})"
        raise TargetError(f"{name!r} is not a folder here (looked at {path.absolute()}), and it {reason}") from error
    return {}


def _refusal(error: Exception) -> str | None:
    """What the hub answered, or None if it did not answer."""
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return "cannot be a name on the Hugging Face hub"
    if isinstance(error, errors.GatedRepoError):
        return "is gated on the Hugging Face hub: accept its terms there and log in with `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "is not a model on the Hugging Face hub that you may read"
    if isinstance(error, errors.EntryNotFoundError):
        return "has no config.json on the Hugging Face hub, so it is not a transformers model"
    return None
