"""Training-time test: the drafter unrolled on its own outputs, as in decoding (EAGLE-3, arXiv 2503.01840, section 3.2).

At step j, query i stands for the node at depth j of a chain that was drafted behind token i + 1. It holds the state
that step j - 1 came to there and the embedding of token i + 1 + j, is rotated to position i + j, and sees the true rows
0 .. i, and of each step 1 .. j its own row only. It predicts token i + 2 + j.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from eyas.drafter.model import Attention, DraftLayer, Eagle3Model
from eyas.training.features import Features


@dataclass(frozen=True)
class Guesses:
    """What the drafter came to at one step, wherever the target wrote all of the draft up to there."""

    normed: torch.Tensor  # [M, H], what the head takes
    labels: torch.Tensor  # int64 [M], rows of ``Features.labels``


class Rows(NamedTuple):
    """Keys and values of one layer at one step, each [B, kv_heads, T, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor


class Recorder:
    """The cache of step 0: keeps what each layer writes, and gives it back as it is."""

    def __init__(self) -> None:
        self.rows: list[Rows] = []

    def update(self, k: torch.Tensor, v: torch.Tensor, layer_idx: int, /) -> tuple[torch.Tensor, torch.Tensor]:
        assert layer_idx == len(self.rows)
        self.rows.append(Rows(k, v))
        return k, v


def unroll(model: Eagle3Model, features: Features, steps: int) -> list[Guesses]:
    """One ``Guesses`` for each step, fewer where no run of written tokens is long enough for more."""
    batch, label_of = features.batch, features.label_of
    model.reserve_positions(batch.tokens.shape[1] + steps)
    true, seen = Recorder(), batch.seen()
    embeds = model.embed(batch.tokens.roll(-1, 1))  # whatever comes behind a row's last token is not asked for
    rope = model.rotations(batch.places)
    first = model.fuse(features.states).to(model.dtype)  # under autocast too, the states themselves stay float32
    hidden, normed = model.run(embeds, first, rope, seen[:, None], true)
    asked = batch.ahead >= 2
    guesses = [Guesses(normed[asked], label_of.roll(-1, 1)[asked])]
    take = _places(batch.ahead >= 3)  # only these have a second step
    hidden, seen, places, ahead = (_taken(x, take) for x in (hidden, seen, batch.places, batch.ahead))
    drafted: list[list[Rows]] = [[] for _ in model.layers]
    for step in range(1, steps):
        asked = ahead >= step + 2
        if not asked.any():
            break
        token = (take + 1 + step).clamp(max=batch.tokens.shape[1] - 1)
        embeds, rope = model.embed(batch.tokens.gather(1, token)), model.rotations(places + step)
        for layer, known, own in zip(model.layers, true.rows, drafted, strict=True):
            assert isinstance(layer, DraftLayer)
            hidden = _layer(layer, embeds, hidden, rope, known, seen, own)
        normed = model.norm(hidden)
        hidden = normed if model.config.norm_output else hidden
        guesses.append(Guesses(normed[asked], label_of.gather(1, token)[asked]))
    return guesses


def _places(wanted: torch.Tensor) -> torch.Tensor:
    """int64 [B, A]: by line, where ``wanted`` bool [B, T] is True; lines that have fewer get others behind them."""
    most = int(wanted.sum(1).max())
    return wanted.int().argsort(dim=1, descending=True, stable=True)[:, :most]


def _taken(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[B, A, ...] of [B, T, ...]."""
    return x[torch.arange(len(x), device=x.device)[:, None], places]


def _layer(
    layer: DraftLayer,
    embeds: torch.Tensor,
    hidden: torch.Tensor,
    rope: torch.Tensor,
    true: Rows,
    seen: torch.Tensor,
    drafted: list[Rows],
) -> torch.Tensor:
    """``DraftLayer.forward``, but for what attention sees. Adds this step's rows to ``drafted``."""
    if layer.hidden_norm is None:
        x = layer.input_layernorm(hidden)
    else:
        normed = layer.hidden_norm(hidden)
        x = torch.cat((layer.input_layernorm(embeds), normed), dim=-1)
        hidden = normed if layer.norm_before_residual else hidden
    q, rows = _projected(layer.self_attn, x, rope)
    drafted.append(rows)
    hidden = hidden + layer.self_attn.o_proj(attend(q, true, seen, drafted))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def _projected(attention: Attention, x: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, Rows]:
    """Queries [B, heads, A, head_dim], and this step's rows, as ``Attention.forward`` makes them."""
    a = attention
    qkv = a.qkv_proj(x).unflatten(-1, (-1, a.head_dim))
    qk, v = qkv.split((a.heads + a.kv_heads, a.kv_heads), dim=2)
    if a.q_norm is not None and a.k_norm is not None:
        qk = torch.cat((a.q_norm(qk[:, :, : a.heads]), a.k_norm(qk[:, :, a.heads :])), dim=2)
    cos, sin = rope.chunk(2, dim=-1)
    qk = torch.addcmul(qk * cos, qk.roll(a.head_dim // 2, -1), sin)
    q, k = qk.split((a.heads, a.kv_heads), dim=2)
    return q.transpose(1, 2), Rows(k.transpose(1, 2), v.transpose(1, 2))


def attend(q: torch.Tensor, true: Rows, seen: torch.Tensor, drafted: list[Rows]) -> torch.Tensor:
    """[B, A, heads * head_dim]: one softmax over the true rows that are seen and the query's own drafted ones.

    q: [B, heads, A, head_dim]; true: T rows; seen: bool [B, A, T]; drafted: A rows each.
    """
    count, size = q.shape[2:]
    kv_heads = true.keys.shape[1]
    q = (q * size**-0.5).unflatten(1, (kv_heads, -1))  # [B, kv_heads, group, A, head_dim]
    flat = q.flatten(2, 3)
    far = (flat @ true.keys.to(q.dtype).mT).unflatten(2, (-1, count))
    far = far.masked_fill(~seen[:, None, None], float("-inf"))
    keys, values = (torch.stack(parts, dim=-2)[:, :, None] for parts in zip(*drafted, strict=True))
    near = (q[..., None, :] * keys).sum(-1)  # [B, kv_heads, group, A, steps]
    weights = torch.cat((far, near.to(far.dtype)), dim=-1).softmax(-1)
    far, near = weights.split((far.shape[-1], near.shape[-1]), dim=-1)
    out = (far.flatten(2, 3) @ true.values.to(far.dtype)).unflatten(2, (-1, count))
    out = out + (near[..., None] * values).sum(-2)
    return out.flatten(1, 2).transpose(1, 2).flatten(2)
