"""What an EAGLE-3 drafter is, in one spelling: sizes, norms, vocabulary, and the target layers it listens to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eyas.core import CheckpointError


@dataclass(frozen=True)
class Eagle3Config:
    """A drafter's description in one spelling. ``dialect`` is where it came from: "eagle", "sglang" or "vllm".

    The first layer reads [embedding; state], both ``hidden_size`` wide; further layers are ordinary Llama layers. Where
    ``own_embedding`` or ``own_head`` is False the drafter borrows the target's; ``tied_head`` means that it uses its
    embedding, its own or the borrowed one, as head.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # the target's
    draft_vocab_size: int
    num_hidden_layers: int = 1
    num_aux: int = 3
    aux_layer_ids: tuple[int, ...] | None = None  # entry ids, ascending; None: the checkpoint leaves it to the default
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    qk_norm: bool = False  # Qwen3's norm over each query and key head
    fc_norm: bool = False  # EAGLE-3.1: one norm per auxiliary state, before fc
    norm_before_fc: bool = False  # gpt-oss drafters: one norm over their concatenation
    norm_output: bool = False  # EAGLE-3.1: the next draft step gets the state after the final norm
    norm_before_residual: bool = False  # the residual of the first layer starts from the normed state
    own_embedding: bool = False
    own_head: bool = True
    tied_head: bool = False
    dialect: str = "sglang"

    @property
    def has_fc(self) -> bool:
        """A single state of the drafter's own width needs no fusion: SGLang then skips fc and its norms."""
        return self.num_aux * self.target_hidden_size != self.hidden_size

    def mismatches(self, hidden_size: int, vocab_size: int, target: str) -> list[str]:
        """Why it is not for a target of these sizes. ``target`` and a number read as a sentence."""
        pairs = {
            "hidden size": (self.target_hidden_size, hidden_size),
            "vocabulary size": (self.vocab_size, vocab_size),
        }
        return [
            f"made for a target of {what} {made_for}, {target} {found}: take the drafter of this target"
            for what, (made_for, found) in pairs.items()
            if made_for != found
        ]

    def problems(self) -> list[str]:
        """What makes this description impossible, one sentence each."""
        ids = self.aux_layer_ids
        shared = self.hidden_size == self.target_hidden_size
        head = self.own_head or self.tied_head or (shared and self.draft_vocab_size == self.vocab_size)
        c = self
        checks = [
            (
                c.num_attention_heads % c.num_key_value_heads == 0,
                f"{c.num_attention_heads} attention heads do not divide into {c.num_key_value_heads} key-value groups",
            ),
            (min(ids or (0,)) >= 0, f"auxiliary layers must not be negative: entry ids {list(ids or ())[:8]}"),
            (0 < c.rms_norm_eps < 1, "rms_norm_eps is not a small positive number"),
            (c.head_dim % 2 == 0, f"head_dim {c.head_dim} is odd, so it cannot be rotated"),
            (c.draft_vocab_size <= c.vocab_size, f"draft_vocab_size exceeds vocab_size {c.vocab_size}"),
            (len(set(ids or ())) == len(ids or ()), f"auxiliary layers repeat: entry ids {list(ids or ())}"),
            (ids is None or len(ids) == c.num_aux, f"{len(ids or ())} auxiliary layer ids for {c.num_aux} states"),
            (
                ids is not None or c.num_aux == 3,
                f"no layer ids say which {c.num_aux} states fc takes; the default is 3",
            ),
            (c.has_fc or not (c.fc_norm or c.norm_before_fc), "a norm before fc is set but there is no fc"),
            (
                c.own_embedding or shared,
                f"hidden_size {c.hidden_size} differs from target_hidden_size {c.target_hidden_size}, so the target's "
                "embedding cannot serve and the file must hold embed_tokens.weight",
            ),
            (head, "no lm_head.weight, and the target's head needs the same hidden size and the full vocabulary"),
            (not c.tied_head or c.draft_vocab_size == c.vocab_size, "a tied head needs the full vocabulary"),
            (c.hidden_act == "silu", f"hidden_act is {c.hidden_act!r}; like the engines, Eyas has silu only"),
            *_rope_checks(c.rope),
        ]
        return [message for fine, message in checks if not fine]


# What each kind of RoPE scaling needs beside rope_theta. "dynamic" and "longrope" change with the sequence's length,
# which a drafter that redoes its positions cannot follow consistently.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def _rope_checks(rope: Mapping[str, Any]) -> list[tuple[bool, str]]:
    kind = rope.get("rope_type")
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        return [(False, f"rope_type {kind!r} is not one of {', '.join(ROPE_KEYS)}")]
    keys = ("rope_theta", *ROPE_KEYS[kind])
    return [
        (
            type(rope.get(key)) in (int, float) and 0 < rope[key] < 1e30,
            f"RoPE of type {kind!r} needs a positive {key}, found {rope.get(key)!r}",
        )
        for key in keys
    ]


def default_layer_ids(num_target_layers: int) -> tuple[int, ...]:
    """[2, n // 2, n - 3] as entry ids: what SGLang, vLLM and the official EAGLE capture when a checkpoint says nothing.

    Raises CheckpointError for a target too shallow (n < 7) for these to be three ascending layers.
    """
    n = num_target_layers
    if n < 7:
        raise CheckpointError(
            f"the checkpoint names no auxiliary layers, and the default [2, n // 2, n - 3] is not three ascending "
            f"layers for a target of n = {n}; add eagle_aux_hidden_state_layer_ids to its config"
        )
    return 2, n // 2, n - 3


def resolve_layer_ids(config: Eagle3Config, num_target_layers: int) -> tuple[int, ...]:
    """The entry ids to capture on a target of n layers. Raises CheckpointError for ids outside 0..n."""
    if config.aux_layer_ids is None:
        return default_layer_ids(num_target_layers)
    outside = [i for i in config.aux_layer_ids if not 0 <= i <= num_target_layers]
    if outside:
        raise CheckpointError(
            f"auxiliary layers are entry ids {list(config.aux_layer_ids)} (output ids "
            f"{[i - 1 for i in config.aux_layer_ids]}), but this target has {num_target_layers} layers, so entry ids "
            f"end at {num_target_layers}: take the drafter of this target, or give aux_layer_ids where the file "
            "follows the other convention"
        )
    return config.aux_layer_ids


def tensor_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Name (Eyas's) and shape of every weight a checkpoint of this drafter must hold. The vocabulary maps are none."""
    c = config
    h, target, wide = c.hidden_size, c.target_hidden_size, c.num_aux * c.target_hidden_size
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (h,)}
    if c.has_fc:
        shapes["fc.weight"] = (h, wide)
    if c.norm_before_fc:
        shapes["input_norm.weight"] = (wide,)
    if c.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (target,) for i in range(c.num_aux)}
    if c.own_embedding:
        shapes["embed_tokens.weight"] = (c.vocab_size, h)
    if c.own_head:
        shapes["lm_head.weight"] = (c.draft_vocab_size, h)
    for index in range(c.num_hidden_layers):
        at, width = f"layers.{index}.", 2 * h if index == 0 else h
        if index == 0:
            shapes[at + "hidden_norm.weight"] = (h,)
        shapes |= {at + f"{norm}.weight": (h,) for norm in ("input_layernorm", "post_attention_layernorm")}
        rows = {"q_proj": (queries, width), "k_proj": (keys, width), "v_proj": (keys, width), "o_proj": (h, queries)}
        shapes |= {at + f"self_attn.{name}.weight": shape for name, shape in rows.items()}
        if c.attention_bias:
            shapes |= {at + f"self_attn.{name}.bias": shape[:1] for name, shape in rows.items()}
        if c.qk_norm:
            shapes |= {at + f"self_attn.{name}.weight": (c.head_dim,) for name in ("q_norm", "k_norm")}
        shapes |= {at + f"mlp.{name}.weight": (c.intermediate_size, h) for name in ("gate_proj", "up_proj")}
        shapes[at + "mlp.down_proj.weight"] = (h, c.intermediate_size)
    return shapes
