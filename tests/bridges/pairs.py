"""Targets and drafters that fit each other, as folders: a config for the one, the right shapes for the other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from drafter import folders
from drafter.folders import LAYERS, D, H, V

TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "hidden_size": H,
    "vocab_size": V,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
}
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "media_placeholder_token_id": 7,
    "text_config": {**TARGET, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
    "vision_config": {"model_type": "vision"},
}


def target(folder: Path, config: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A model folder without weights; ``...`` removes a key."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {k: v for k, v in {**(config or TARGET), **changes}.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def drafter(folder: Path, dialect: str, without: tuple[str, ...] = (), **changes: Any) -> Path:
    """A drafter in ``dialect``, as safetensors whatever the dialect; ``...`` removes a key."""
    from safetensors.torch import save_file

    tensors = changes.pop("tensors", {})
    said = {**folders.CONFIGS[dialect], **({"num_hidden_layers": 1} if dialect == "eagle" else {}), **changes}
    held = {k: v for k, v in {**folders.weights(dialect), **tensors}.items() if k not in without}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in said.items() if v is not ...}))
    save_file(held, folder / "model.safetensors")
    return folder


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


__all__ = ["KIMI", "LAYERS", "TARGET", "D", "H", "V", "drafter", "target", "zeros"]
