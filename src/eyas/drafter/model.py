"""The EAGLE-3 draft model: fuses a target's states, then drafts from [embedding; state], one decoder layer or more.

Differentiable throughout, for training, and lean, for five tiny steps in a row on a CPU. Semantics follow vLLM 0.32
models/llama_eagle3.py and qwen3_eagle3.py, and SGLang 0.5.23 srt/models/llama_eagle3.py, which agree but for names.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from eyas.core import CheckpointError
from eyas.drafter.config import Eagle3Config, default_layer_ids


class KVCache(Protocol):
    """Stores what it is given and returns all that the mask's columns stand for, ``[B, kv_heads, S, head_dim]``."""

    def update(self, k: torch.Tensor, v: torch.Tensor, layer_idx: int, /) -> tuple[torch.Tensor, torch.Tensor]: ...


class DraftStates(NamedTuple):
    """``next_hidden`` [B, T, H] is the state of the next draft step, ``normed`` [B, T, H] what ``logits`` takes."""

    next_hidden: torch.Tensor
    normed: torch.Tensor


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; biases and per-head q/k norms where the config has them."""

    def __init__(self, config: Eagle3Config, index: int):
        super().__init__()
        c = config
        self.index, self.head_dim = index, c.head_dim
        self.heads, self.kv_heads = c.num_attention_heads, c.num_key_value_heads
        width = c.hidden_size * (2 if index == 0 else 1)
        # one product instead of three: at batch 1 a launch costs as much as the arithmetic
        self.qkv_proj = nn.Linear(width, (self.heads + 2 * self.kv_heads) * c.head_dim, bias=c.attention_bias)
        self.o_proj = nn.Linear(self.heads * c.head_dim, c.hidden_size, bias=c.attention_bias)
        self.q_norm = nn.RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = nn.RMSNorm(c.head_dim, c.rms_norm_eps) if c.qk_norm else None

    def forward(
        self, x: torch.Tensor, rope: torch.Tensor, mask: torch.Tensor | None, cache: KVCache | None
    ) -> torch.Tensor:
        batch, count, _ = x.shape
        rotated = self.heads + self.kv_heads
        qkv = self.qkv_proj(x).view(batch, count, rotated + self.kv_heads, self.head_dim)
        qk, v = qkv[:, :, :rotated], qkv[:, :, rotated:].transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, :, : self.heads]), self.k_norm(qk[:, :, self.heads :])), dim=2)
        cos, sin = rope.chunk(2, dim=-1)
        qk = torch.addcmul(qk * cos, qk.roll(self.head_dim // 2, -1), sin)
        q, k = qk[:, :, : self.heads], qk[:, :, self.heads :].transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.index)
        if mask is None and count > 1:
            total = k.shape[2]
            mask = torch.ones(count, total, dtype=torch.bool, device=x.device).tril(total - count)[None, None]
        # The query heads of a group become rows of one: repeating keys, or SDPA's own enable_gqa (which leaves the fast
        # CPU kernel for one query row), cost many times more on a long context.
        group = self.heads // self.kv_heads
        q = q.view(batch, count, self.kv_heads, group, self.head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(batch, self.kv_heads, group * count, self.head_dim)
        if mask is not None and count > 1:
            mask = mask.repeat(1, 1, group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = out.view(batch, self.heads, count, self.head_dim).transpose(1, 2)
        return self.o_proj(out.reshape(batch, count, -1))


class MLP(nn.Module):
    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DraftLayer(nn.Module):
    """Layer 0 reads [norm(embedding); norm(state)] and adds to the state; the others are ordinary Llama layers."""

    def __init__(self, config: Eagle3Config, index: int):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = nn.RMSNorm(size, eps) if index == 0 else None
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = MLP(config)

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        rope: torch.Tensor,
        mask: torch.Tensor | None,
        cache: KVCache | None,
    ) -> torch.Tensor:
        if self.hidden_norm is None:
            x = self.input_layernorm(hidden)
        else:
            normed = self.hidden_norm(hidden)
            x = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
            hidden = normed if self.norm_before_residual else hidden
        hidden = hidden + self.self_attn(x, rope, mask, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Model(nn.Module):
    """A drafter's weights. ``config.aux_layer_ids`` is resolved: the entry ids whose states ``fuse`` expects, in order.

    A drafter without an embedding or head of its own must be given the target's through ``bind`` before use.
    ``draft_to_target`` int64 [D] holds the target's id of each draft token. Loading is ``eyas.drafter.storage``'s work.
    """

    draft_to_target: torch.Tensor

    def __init__(self, config: Eagle3Config):
        super().__init__()
        assert config.aux_layer_ids is not None, "resolve_layer_ids first"
        c = config
        self.config = c
        wide = c.num_aux * c.target_hidden_size
        self.input_norm = nn.RMSNorm(wide, c.rms_norm_eps) if c.norm_before_fc else None
        norms = [nn.RMSNorm(c.target_hidden_size, c.rms_norm_eps) for _ in range(c.num_aux)] if c.fc_norm else []
        self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(wide, c.hidden_size, bias=False) if c.has_fc else None
        self.layers = nn.ModuleList(DraftLayer(c, index) for index in range(c.num_hidden_layers))
        self.norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size) if c.own_embedding else None
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False) if c.own_head else None
        self.register_buffer("draft_to_target", torch.arange(c.draft_vocab_size))
        self._borrowed_embedding: torch.Tensor | None = None
        self._borrowed_head: torch.Tensor | None = None
        self._rope: torch.Tensor | None = None  # [positions, 2 * head_dim]

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """What to give to the target's ``set_eagle3_layers_to_capture``."""
        return self.config.aux_layer_ids or ()

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def bind(self, embed_weight: torch.Tensor, head_weight: torch.Tensor | None = None) -> None:
        """Lends the target's embedding [V, H] and head [V, H] to a drafter that lacks its own; without a copy.

        The weight is looked up as it is: what a target's embedding *module* adds (Gemma multiplies by sqrt(H) in code)
        is not, as in SGLang and vLLM, so drafters are trained that way. Rows beyond the vocabulary (padding) are not
        used. Bind after moving the drafter, and again when the target's weights are replaced. Raises CheckpointError
        for weights that do not fit.
        """
        c = self.config
        if not c.own_embedding:
            self._borrowed_embedding = self._lent("embedding", embed_weight, c.vocab_size)
        if not c.own_head and not c.tied_head:
            if head_weight is None:
                raise CheckpointError("this drafter borrows the target's head: give it to bind too")
            self._borrowed_head = self._lent("head", head_weight, c.draft_vocab_size)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [B, T, H] of target token ids int64 [B, T], in the drafter's dtype."""
        return F.embedding(ids, self._embedding())

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """States [B, T, num_aux * target_hidden], concatenated in layer order, to the first draft state [B, T, H].

        Norms first, as the config has them: over the concatenation (norm_before_fc) or over each state (fc_norm).
        A single state of the drafter's own width passes unchanged, as in SGLang.
        """
        aux = aux.to(self.dtype)
        if self.fc is None:
            return aux
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm:
            parts = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(aux)

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: KVCache | None = None,
    ) -> DraftStates:
        """One pass over T slots: slot i pairs the state of token i with the embedding of token i + 1.

        ``embeds`` and ``hidden`` are [B, T, H] in the drafter's dtype (from ``embed``; from ``fuse`` or an earlier
        ``next_hidden``), ``position_ids`` int64 [B, T] >= 0, ``mask`` bool [B, 1, T, S], True where query t may see
        key s, S being the number of keys the cache returns (T without one). Without a mask the T slots are the last of
        S, in causal order.
        """
        count = self.config.max_position_embeddings if self._rope is None else len(self._rope)
        if position_ids.device.type == "cpu" and count <= (last := int(position_ids.max())):
            count = 2 * (last + 1)
        self.reserve_positions(count)
        return self.run(embeds, hidden, self.rotations(position_ids), mask, cache)

    def run(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        rope: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: KVCache | None = None,
    ) -> DraftStates:
        """``forward`` on ``rotations``: for those who reserve positions and then want no look at their values."""
        for layer in self.layers:
            hidden = layer(embeds, hidden, rope, mask, cache)
        normed = self.norm(hidden)
        return DraftStates(normed if self.config.norm_output else hidden, normed)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Scores [..., D] of the draft vocabulary, in the drafter's dtype, from ``DraftStates.normed`` [..., H]."""
        if self.lm_head is not None:
            return self.lm_head(normed)
        weight = self._embedding() if self.config.tied_head else self._borrowed_head
        if weight is None:
            raise CheckpointError("this drafter borrows the target's head: call bind first")
        return F.linear(normed, weight)

    def reserve_positions(self, count: int) -> None:
        """Makes positions below ``count`` ready. ``forward`` does so by itself, but only on a CPU and at some cost."""
        table = self._rope
        if table is None or len(table) < count or table.dtype != self.dtype or table.device != self.device:
            self._rope = rotation_table(self.config, count).to(self.device, self.dtype)

    def rotations(self, position_ids: torch.Tensor) -> torch.Tensor:
        """[B, T, 1, 2 * head_dim] for positions that were reserved: cosines, then sines with the sign of their half."""
        assert self._rope is not None, "reserve_positions first"
        return F.embedding(position_ids, self._rope).unsqueeze(2)

    def _embedding(self) -> torch.Tensor:
        weight = self.embed_tokens.weight if self.embed_tokens is not None else self._borrowed_embedding
        if weight is None:
            raise CheckpointError("this drafter borrows the target's embedding: call bind first")
        return weight

    def _lent(self, what: str, weight: torch.Tensor, rows: int) -> torch.Tensor:
        size = self.config.hidden_size
        if weight.dim() != 2 or weight.shape[1] != size or weight.shape[0] < rows:
            raise CheckpointError(f"the target's {what} is {list(weight.shape)}, the drafter needs [{rows}, {size}]")
        # detached: borrowed weights are the target's, so they are no parameters of this module
        return weight.detach()[:rows].to(self.device, self.dtype)


def rotation_table(config: Eagle3Config, count: int) -> torch.Tensor:
    """float32 [count, 2 * head_dim]: cosines, then sines, for the rotate-half (NeoX) style that all dialects use.

    ``x * cos + roll(x, head_dim / 2) * sin`` rotates a head: the first half of the sines carries rotate-half's minus.
    """
    frequencies, scale = _frequencies(config)
    angles = torch.outer(torch.arange(count, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos, -sin, sin), dim=-1)


def _frequencies(config: Eagle3Config) -> tuple[torch.Tensor, float]:
    """Inverse frequencies float32 [head_dim / 2] and the factor on cosines and sines."""
    kind = config.rope["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return config.rope["rope_theta"] ** -exponents, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    llama = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope),
    )
    return ROPE_INIT_FUNCTIONS[kind](llama, torch.device("cpu"))


def untrained(
    target_hidden_size: int,
    num_target_layers: int,
    vocab_size: int,
    *,
    draft_vocab_size: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    **overrides: Any,
) -> Eagle3Model:
    """A drafter of the standard shape with random weights: the start of training, and a stand-in that drafts nonsense.

    One layer as wide as the target with the target's embedding; a head of its own over the first ``draft_vocab_size``
    tokens (all by default; set ``draft_to_target`` for others). ``overrides`` are fields of Eagle3Config. The weights
    depend on the sizes and ``seed`` alone. Raises CheckpointError for sizes that do not fit each other.
    """
    hidden = overrides.get("hidden_size", target_hidden_size)
    sizes = (d for d in (128, 64, 32, 16, 8, 4, 2) if hidden % d == 0 and hidden >= 8 * d)
    head_dim = overrides.get("head_dim") or next(sizes, hidden)
    heads = overrides.get("num_attention_heads", hidden // head_dim)
    shape: dict[str, Any] = {
        "hidden_size": hidden,
        "head_dim": head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": next(heads // group for group in (4, 3, 2, 1) if heads % group == 0),
        "intermediate_size": -(-hidden * 8 // 3 // 32) * 32,
        "aux_layer_ids": _standard_layer_ids(num_target_layers),
        "max_position_embeddings": 8192,
    } | overrides
    shape.setdefault("num_aux", len(shape["aux_layer_ids"]))
    config = Eagle3Config(
        target_hidden_size=target_hidden_size,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size or vocab_size,
        **shape,
    )
    problems = config.problems()
    if problems:
        raise CheckpointError("; ".join(problems))
    model = Eagle3Model(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.02, generator=generator)
    return model.to(device=device, dtype=dtype).eval()


def _standard_layer_ids(num_target_layers: int) -> tuple[int, ...]:
    if num_target_layers >= 7:
        return default_layer_ids(num_target_layers)
    n = num_target_layers
    return tuple(sorted({n // 3, 2 * n // 3, n}))
