"""Drafters on disk in every dialect, spelled by hand here and not by the code under test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

H, HEADS, KV, HEAD, WIDE, V, D = 32, 4, 2, 8, 48, 64, 20
LAYERS = 10  # the target's; the default entry ids are 2, 5, 7
TARGET = {"target_hidden_size": H, "target_vocab_size": V, "num_target_layers": LAYERS}
IDS = "eagle_aux_hidden_state_layer_ids"
CHOSEN = torch.tensor([i * 3 + 1 for i in range(D)])  # target ids of the reduced vocabulary

LLAMA = {
    "model_type": "llama",
    "hidden_size": H,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "intermediate_size": WIDE,
    "vocab_size": V,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,  # a key that means nothing to a drafter
}
OFFICIAL = {**LLAMA, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": D, "num_hidden_layers": 40}
SGLANG = {
    **LLAMA,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": D,
    "eagle_config": {IDS: [1, 4, 6], "use_aux_hidden_state": True},
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/model"}},
    "transformer_layer_config": {
        **{k: v for k, v in LLAMA.items() if k != "rope_theta"},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    },
    "draft_vocab_size": D,
    "norm_before_residual": True,
    "target_hidden_size": None,
    IDS: [2, 5, 7],
}
CONFIGS = {"eagle": OFFICIAL, "sglang": SGLANG, "vllm": SPECULATORS}


def maps() -> dict[str, torch.Tensor]:
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[CHOSEN] = True
    return {"d2t": CHOSEN - torch.arange(D), "t2d": t2d}


def weights(dialect: str = "sglang", seed: int = 0) -> dict[str, torch.Tensor]:
    """One standard layer, as each dialect names it."""
    first = "layers.0." if dialect == "vllm" else "midlayer."
    shapes = {
        "fc.weight": (H, 3 * H),
        "norm.weight": (H,),
        "lm_head.weight": (D, H),
        first + "hidden_norm.weight": (H,),
        first + "input_layernorm.weight": (H,),
        first + "post_attention_layernorm.weight": (H,),
        first + "self_attn.q_proj.weight": (HEADS * HEAD, 2 * H),
        first + "self_attn.k_proj.weight": (KV * HEAD, 2 * H),
        first + "self_attn.v_proj.weight": (KV * HEAD, 2 * H),
        first + "self_attn.o_proj.weight": (H, HEADS * HEAD),
        first + "mlp.gate_proj.weight": (WIDE, H),
        first + "mlp.up_proj.weight": (WIDE, H),
        first + "mlp.down_proj.weight": (H, WIDE),
    }
    made = {name: noise(shape, seed, number) for number, (name, shape) in enumerate(shapes.items())}
    return {**made, **maps()}


def noise(shape: tuple[int, ...], seed: int = 0, number: int = 99) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + number)
    values = torch.randn(shape, generator=generator)
    return 1 + 0.1 * values if len(shape) == 1 else 0.2 * values


def write(
    folder: Path,
    dialect: str = "sglang",
    *,
    config: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
    without: tuple[str, ...] = (),
    **changes: Any,
) -> Path:
    """A folder in ``dialect``: config keys from ``changes`` (``...`` removes one), tensors added or left out."""
    said = {**CONFIGS[dialect], **(config or {}), **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in said.items() if v is not ...}))
    held = {k: v for k, v in {**weights(dialect), **(tensors or {})}.items() if k not in without}
    if dialect == "eagle":
        torch.save(held, folder / "pytorch_model.bin")
    else:
        save_file(held, folder / "model.safetensors")
    return folder


def shard(folder: Path) -> None:
    """Splits model.safetensors into two files and an index."""
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def maps_as_npy(folder: Path) -> None:
    for name, values in maps().items():
        np.save(folder / f"{name}.npy", values.numpy())
