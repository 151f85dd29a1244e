"""EAGLE-3's forward pass in plain float64 loops: one token, one head, one key at a time."""

from __future__ import annotations

import math

import torch

Weights = dict[str, torch.Tensor]


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, position: int, frequencies: torch.Tensor, scale: float) -> torch.Tensor:
    half = len(x) // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = position * float(frequencies[i])
        cos, sin = math.cos(angle) * scale, math.sin(angle) * scale
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def draft(
    weights: Weights,
    embeds: torch.Tensor,
    hidden: torch.Tensor,
    positions: list[int],
    mask: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    layers: int = 1,
    eps: float = 1e-6,
    frequencies: torch.Tensor,
    scale: float = 1.0,
    norm_before_residual: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(state before the final norm, state after it), both [T, H] in float64, for one sequence; mask bool [T, T]."""
    w = {name: value.double() for name, value in weights.items()}
    hidden, count = hidden.double(), len(positions)
    for layer in range(layers):
        at = f"layers.{layer}."
        residual = hidden
        if layer == 0:
            normed = rms(hidden, w[at + "hidden_norm.weight"], eps)
            residual = normed if norm_before_residual else hidden
            x = torch.cat([rms(embeds.double(), w[at + "input_layernorm.weight"], eps), normed], -1)
        else:
            x = rms(hidden, w[at + "input_layernorm.weight"], eps)

        def project(name: str, x: torch.Tensor, at: str = at) -> torch.Tensor:
            out = x @ w[f"{at}self_attn.{name}.weight"].T
            return out + w.get(f"{at}self_attn.{name}.bias", torch.zeros(())).double()

        q, k, v = (project(name, x).view(count, -1, head_dim) for name in ("q_proj", "k_proj", "v_proj"))
        if at + "self_attn.q_norm.weight" in w:
            q = rms(q, w[at + "self_attn.q_norm.weight"], eps)
            k = rms(k, w[at + "self_attn.k_norm.weight"], eps)
        attended = torch.zeros(count, heads, head_dim, dtype=torch.float64)
        for t in range(count):
            for head in range(heads):
                group = head // (heads // kv_heads)
                query = rotate(q[t, head], positions[t], frequencies, scale)
                seen = [s for s in range(count) if mask[t, s]]
                scores = [
                    float(query @ rotate(k[s, group], positions[s], frequencies, scale)) / math.sqrt(head_dim)
                    for s in seen
                ]
                shares = torch.tensor(scores, dtype=torch.float64).softmax(0)
                for share, s in zip(shares, seen, strict=True):
                    attended[t, head] += share * v[s, group]
        hidden = residual + project("o_proj", attended.view(count, -1))
        x = rms(hidden, w[at + "post_attention_layernorm.weight"], eps)
        gate, up = x @ w[at + "mlp.gate_proj.weight"].T, x @ w[at + "mlp.up_proj.weight"].T
        hidden = hidden + (gate * torch.sigmoid(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    return hidden, rms(hidden, w["norm.weight"], eps)
