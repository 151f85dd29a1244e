"""One question: does this drafter fit this target in this engine, with these flags?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eyas.bridges.code.classes import classes_of
from eyas.bridges.code.interpreter import Interpreter
from eyas.bridges.code.source import EngineSource
from eyas.bridges.code.values import Record, Tensor
from eyas.bridges.target import Target
from eyas.drafter.checkpoint import Checkpoint
from eyas.drafter.config import default_layer_ids
from eyas.drafter.dialects import Reading

# No config class of transformers has a default for these: a config.json without them is an object without them.
EAGLE_KEYS = frozenset({
    "draft_vocab_size", "target_hidden_size", "eagle_config", "eagle_aux_hidden_state_layer_ids", "norm_output",
    "norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "num_aux_hidden_states", "num_aux_layers",
    "speculators_config", "dflash_config", "layer_types",
})  # fmt: skip
# What transformers' LlamaConfig and Qwen3Config fill in.
_LLAMA = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "num_hidden_layers": 32, "bias": False,
}  # fmt: skip


@dataclass
class Case:
    source: EngineSource
    target: Target
    checkpoint: Checkpoint
    reading: Reading
    flags: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.classes = classes_of(self.source)

    def interpreter(self, facts: Mapping[str, Any]) -> Interpreter:
        return Interpreter(self.classes, facts, self.environment)

    def target_config(self) -> Record:
        return Record(dict(self.target.config), frozenset())

    def drafter_config(self, raw: Mapping[str, Any] | None = None) -> Record:
        """The drafter's config.json as transformers' config object of the version that this engine requires."""
        raw = dict(self.checkpoint.config if raw is None else raw)
        heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
        filled = {"num_key_value_heads": heads}
        if isinstance(heads, int) and isinstance(hidden, int) and heads:
            filled["head_dim"] = hidden // heads
        given = {key: value for key, value in raw.items() if not (value is None and key in filled)}
        return Record(_LLAMA | filled | given | self._rope(raw), EAGLE_KEYS)

    def _rope(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """transformers 4 knows rope_theta and rope_scaling, 5 turns them into rope_parameters."""
        older = {"rope_theta": raw.get("rope_theta", 10000.0), "rope_scaling": raw.get("rope_scaling")}
        if self.source.requires("transformers").startswith("4."):
            return older
        newer = raw.get("rope_parameters") or {"rope_theta": older["rope_theta"], **(older["rope_scaling"] or {})}
        return {"rope_parameters": {"rope_type": newer.get("type", "default"), **newer}}

    def tensors(self) -> list[Tensor]:
        return [Tensor(name, tensor.shape) for name, tensor in self.checkpoint.tensors.items()]

    @property
    def wanted_layers(self) -> tuple[int, ...] | None:
        """The entry ids that the checkpoint means, as far as its config tells. None: they cannot be known."""
        if self.reading.layer_ids.entry is not None:
            return self.reading.layer_ids.entry
        return default_layer_ids(n) if (n := self.target.layers or 0) >= 7 else None
