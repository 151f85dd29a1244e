"""A drafter to and from disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from eyas.core import CheckpointError, UsageError
from eyas.drafter import dialects, vocabulary, writing
from eyas.drafter.checkpoint import Checkpoint, refusal
from eyas.drafter.config import Eagle3Config, resolve_layer_ids, tensor_shapes
from eyas.drafter.model import Eagle3Model
from eyas.files import whole

if TYPE_CHECKING:
    from eyas.target.contract import Eagle3Target

_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def load_drafter(
    path: str | Path,
    *,
    target_hidden_size: int,
    target_vocab_size: int,
    num_target_layers: int,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    aux_layer_ids: tuple[int, ...] | None = None,
) -> Eagle3Model:
    """The drafter at ``path`` (a folder or a weights file, any dialect) for a target of these sizes, in eval mode.

    ``aux_layer_ids`` are entry ids that replace the checkpoint's, where its convention is known to be another. ``bind``
    must still lend it the target's embedding and head where it has none. Raises one CheckpointError that lists what is
    wrong: file, tensor, expected, found, and what to do.
    """
    checkpoint = Checkpoint.open(path)
    reading = dialects.for_target(dialects.read(checkpoint), num_target_layers)
    config = reading.config
    if aux_layer_ids is not None:
        config = replace(config, aux_layer_ids=tuple(sorted(aux_layer_ids)))
    problems = list(reading.problems)
    problems += config.mismatches(target_hidden_size, target_vocab_size, "this target's is")
    try:
        config = replace(config, aux_layer_ids=resolve_layer_ids(config, num_target_layers))
    except CheckpointError as error:
        problems.append(str(error))
    if aux_layer_ids is not None and not problems:
        problems += config.problems()
    if problems:
        raise refusal(checkpoint.path, problems)
    return _build(checkpoint, reading, config, dtype, device)


def load_for(
    target: Eagle3Target,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    aux_layer_ids: tuple[int, ...] | None = None,
) -> Eagle3Model:
    """``load_drafter`` for a target that is loaded: on its device, and in its dtype unless another is given."""
    return load_drafter(
        path,
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        dtype=dtype or target.dtype,
        device=target.device,
        aux_layer_ids=aux_layer_ids,
    )


def save(model: Eagle3Model, folder: str | Path, dialect: str = "sglang") -> None:
    """Writes config.json and model.safetensors, each complete or not at all, in the spelling of ``dialect``.

    Borrowed weights are not written; d2t and t2d are where the vocabulary is reduced. Raises CheckpointError for a
    drafter which the dialect cannot express.
    """
    from safetensors.torch import save_file

    if dialect not in writing.DIALECTS:
        raise UsageError(f"there is no dialect {dialect!r}; write one of {', '.join(writing.DIALECTS)}")
    place = Path(folder)
    state = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    maps = writing.vocabulary_maps(state.pop("draft_to_target").numpy(), model.config.vocab_size)
    reordered = bool(maps) and model.config.draft_vocab_size == model.config.vocab_size
    if reasons := writing.cannot_say(model.config, dialect, reordered):
        raise refusal(place, reasons, "this drafter cannot be written there")
    config = writing.config_json(model.config, dialect, str(model.dtype).removeprefix("torch."))
    tensors = {writing.tensor_name(name, dialect): value for name, value in _split(state, model.config).items()}
    tensors |= {name: torch.from_numpy(values) for name, values in maps.items()}
    place.mkdir(parents=True, exist_ok=True)
    # The config comes last: a folder without it is no drafter yet.
    with whole(place / "config.json") as said, whole(place / "model.safetensors") as weights:
        said.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file({name: value.contiguous().clone() for name, value in tensors.items()}, weights, {"format": "pt"})
        shutil.copymode(said, weights)  # safetensors makes files that nobody else may read


def _build(
    checkpoint: Checkpoint,
    reading: dialects.Reading,
    config: Eagle3Config,
    dtype: torch.dtype,
    device: str | torch.device,
) -> Eagle3Model:
    with torch.device("meta"):  # nothing is initialised that the file is about to fill
        model = Eagle3Model(config)
    wanted = {reading.names[name]: name for name in tensor_shapes(config)}
    # copied: values come mapped from the file, which may be replaced while the drafter lives
    weights = {wanted[name]: value.to(device, dtype, copy=True) for name, value in checkpoint.values(wanted)}
    state = _fuse(weights)
    if "d2t" in reading.names:
        ids = torch.from_numpy(vocabulary.ids_from_offsets(checkpoint.array(reading.names["d2t"])))
    else:
        ids = torch.arange(config.draft_vocab_size)
    state["draft_to_target"] = ids.to(device)
    model.load_state_dict(state, assign=True)
    return model.eval()


def _fuse(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """From the tensors of a file, one per projection, to the module's parameters."""
    state = dict(weights)
    for name in weights:
        for fused, parts in _FUSED.items():
            if f".{parts[0]}." in name:
                members = [name.replace(parts[0], part) for part in parts]
                state[name.replace(parts[0], fused)] = torch.cat([state.pop(member) for member in members])
    return state


def _split(state: Mapping[str, torch.Tensor], config: Eagle3Config) -> dict[str, torch.Tensor]:
    """The inverse of ``_fuse``."""
    shapes = tensor_shapes(config)
    tensors = dict(state)
    for name in state:
        for fused, parts in _FUSED.items():
            if f".{fused}." in name:
                members = [name.replace(fused, part) for part in parts]
                pieces = tensors.pop(name).split([shapes[member][0] for member in members])
                tensors |= dict(zip(members, pieces, strict=True))
    return tensors
