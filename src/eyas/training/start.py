"""Where a drafter starts: from an earlier one, or from the target's own weights.

A new drafter's layer is the target's last, reading the highest of the captured states and, at first, nothing else; its
final norm and head are the target's. From there it learns faster than from random weights. What does not fit (another
kind of layer, another width) starts at random.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from eyas.core import CheckpointError, UsageError
from eyas.drafter.config import ROPE_KEYS
from eyas.drafter.model import Attention, DraftLayer, Eagle3Model, untrained
from eyas.drafter.storage import load_for
from eyas.drafter.vocabulary import Ids
from eyas.target.adapter import HFTarget, nested

QKV, GATES = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def existing(drafter: str, target: HFTarget) -> Eagle3Model:
    """The drafter at a path, in float32 for training. Raises CheckpointError where it does not fit ``target``."""
    model = load_for(target, drafter, dtype=torch.float32)
    model.bind(*target.get_embed_and_head())
    if model.embed_tokens is not None:  # a copy of the target's, or an earlier training's: it stays
        model.embed_tokens.requires_grad_(model.config.tied_head)
    return model


def new(
    target: HFTarget, ids: Ids, *, layers: int = 1, aux_layer_ids: tuple[int, ...] | None = None, seed: int = 0
) -> Eagle3Model:
    """A float32 drafter of ``target`` that proposes the tokens ``ids``, started from the target's weights."""
    given = {} if aux_layer_ids is None else {"aux_layer_ids": aux_layer_ids}
    if aux_layer_ids and not 0 <= min(aux_layer_ids) <= max(aux_layer_ids) <= target.num_layers:
        raise UsageError(f"aux_layers are entry ids from 0 to {target.num_layers}, got {list(aux_layer_ids)}.")
    if aux_layer_ids and len(aux_layer_ids) < 2:
        raise UsageError("aux_layers must be two or more: of a single state there is nothing to fuse.")
    wanted: dict[str, Any] = {
        "target_hidden_size": target.hidden_size,
        "num_target_layers": target.num_layers,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": len(ids),
        "num_hidden_layers": layers,
        "seed": seed,
        **given,
    }
    try:
        model = untrained(**wanted, **shape_of(target.config))
    except CheckpointError:  # heads that do not divide as Llama's do: the usual shape for this width
        model = untrained(**wanted)
    model.draft_to_target.copy_(torch.from_numpy(ids))
    take_over(model, target)
    model.to(target.device)
    model.bind(*target.get_embed_and_head())
    return model


def shape_of(config: Any) -> dict[str, Any]:
    """Fields of Eagle3Config that a drafter shares with a target of this text config, where it has them."""
    names = (
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "rms_norm_eps",
        "max_position_embeddings",
    )
    shape = {name: value for name in names if (value := getattr(config, name, None)) is not None}
    heads = shape.get("num_attention_heads", 1)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return shape | {"head_dim": head_dim, "rope": _rope(config)}


def _rope(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    inner = rope.get("full_attention")
    rope = inner if isinstance(inner, Mapping) else rope
    kind, theta = rope.get("rope_type", "default"), rope.get("rope_theta") or 10000.0
    if all(isinstance(rope.get(key), int | float) for key in ROPE_KEYS.get(kind, ("unknown",))):
        return {"rope_type": kind, "rope_theta": theta, **{key: rope[key] for key in ROPE_KEYS[kind]}}
    return {"rope_type": "default", "rope_theta": theta}


@torch.no_grad()
def take_over(model: Eagle3Model, target: HFTarget) -> None:
    """Copies what fits from ``target`` into ``model``."""
    width = target.hidden_size
    if model.config.hidden_size != width:
        return
    if model.fc is not None:
        model.fc.weight[:] = 0
        model.fc.weight[:, -width:] = torch.eye(width)
    if model.lm_head is not None:
        model.lm_head.weight.copy_(target.get_embed_and_head()[1][model.draft_to_target.to(target.device)])
    _copy_norm(model.norm, final_norm(target), target)
    for layer, theirs in zip(model.layers, target.layers[-len(model.layers) :], strict=False):
        assert isinstance(layer, DraftLayer)
        _copy_layer(layer, theirs, target)


def _copy_layer(layer: DraftLayer, theirs: nn.Module, target: HFTarget) -> None:
    parts: dict[str, Any] = dict(theirs.named_children())
    if set(parts) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return
    attention, mlp = parts["self_attn"], parts["mlp"]
    if _plain_linears(attention, (*QKV, "o_proj")) and _fits(layer.self_attn, attention):
        fused = torch.cat([getattr(attention, name).weight for name in QKV])
        layer.self_attn.qkv_proj.weight[:] = 0  # of the embedding, which comes first, nothing yet
        layer.self_attn.qkv_proj.weight[:, -fused.shape[1] :] = fused
        layer.self_attn.o_proj.weight.copy_(attention.o_proj.weight)
        norm = layer.hidden_norm if layer.hidden_norm is not None else layer.input_layernorm
        _copy_norm(norm, parts["input_layernorm"], target)
    silu = getattr(target.config, "hidden_act", None) == "silu" and _plain_linears(mlp, (*GATES, "down_proj"))
    if silu and mlp.down_proj.weight.shape == layer.mlp.down_proj.weight.shape:
        layer.mlp.gate_up_proj.weight.copy_(torch.cat([getattr(mlp, name).weight for name in GATES]))
        layer.mlp.down_proj.weight.copy_(mlp.down_proj.weight)
        _copy_norm(layer.post_attention_layernorm, parts["post_attention_layernorm"], target)


def _plain_linears(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether a module has these layers, without biases, and nothing else with weights (norms of heads, experts)."""
    found = {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}
    return set(found) == set(names) and all(
        isinstance(child, nn.Linear) and child.bias is None for child in found.values()
    )


def _fits(ours: Attention, theirs: Any) -> bool:
    rows = sum(getattr(theirs, name).weight.shape[0] for name in QKV)
    shapes = (rows, theirs.o_proj.weight.shape)
    return shapes == (ours.qkv_proj.weight.shape[0], ours.o_proj.weight.shape)


def _copy_norm(ours: nn.RMSNorm, theirs: nn.Module | None, target: HFTarget) -> None:
    """What an RMS norm makes of a state of ones is its scale, whether it multiplies by its weight or by 1 + weight."""
    if theirs is None or getattr(theirs, "bias", None) is not None or not hasattr(theirs, "weight"):
        return
    ones = torch.ones(1, 1, target.hidden_size, dtype=target.dtype, device=target.device)
    ours.weight.copy_(theirs(ones)[0, 0])


def final_norm(target: HFTarget) -> nn.Module | None:
    """The norm between the last layer and the head, where it is found by its usual name."""
    for _, module in nested(target.model):
        if any(child is target.layers[0] for child in getattr(module, "layers", ())):
            return getattr(module, "norm", None)
    return None
