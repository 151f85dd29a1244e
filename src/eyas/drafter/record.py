"""What a conversion changed, and where each value of the result came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eyas import __version__
from eyas.drafter.checkpoint import Checkpoint
from eyas.drafter.dialects import IDS, MAPS, Reading
from eyas.drafter.verifier import Verifier

NAME = "eyas_conversion.json"

# Keys that mean nothing to a drafter and are kept all the same. No others: what one engine ignores, another obeys.
_CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")
_TARGET = "the target's config.json"
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")

_WHY = {
    "architecture": "by its name the engine finds its drafter class",
    "tensor names": "each dialect has its own; SGLang before 0.5.23 knows midlayer only",
    "layer ids": "SGLang reads output ids in eagle_config, vLLM entry ids at the top level (entry = output + 1)",
    "draft_vocab_size": "SGLang fails without the key; null there means the target's head",
    "num_hidden_layers": "the official trainer copies the target's count; the drafter has as many as its tensors",
    "vocabulary maps": "written only where they say something: vLLM refuses them for a full vocabulary",
    "norm_before_residual": "vLLM and speculators take different defaults, so theirs is written out",
    "RoPE": "transformers 4 reads rope_theta and rope_scaling, 5 rope_parameters",
    "max_position_embeddings": "raised to the target's: engines size their rotary table by it",
    "head": "only SGLang ties a drafter's head to its embedding; elsewhere it is written as a copy",
    "weights": "one safetensors file, which all engines read",
}


@dataclass(frozen=True)
class Change:
    what: str
    before: str
    after: str
    why: str


def origin(source: Checkpoint, name: str | None) -> dict[str, Any]:
    """Of a tensor that is a copy of the source's ``name``, or was computed."""
    if name is None:
        return {"from": "computed from d2t", "file": None}
    return {"from": name, "file": source.tensors[name].file.name}


def carried(raw: Mapping[str, Any], dialect: str) -> dict[str, Any]:
    text = raw.get("transformer_layer_config") or raw
    return {} if dialect == "vllm" else {key: text[key] for key in _CARRIED if key in text}


def changes(source: Checkpoint, reading: Reading, written: Checkpoint, again: Reading) -> tuple[Change, ...]:
    """What reads differently now, from both folders by the same rules."""
    before, after = _spelling(source, reading), _spelling(written, again)
    return tuple(Change(key, before[key], after[key], _WHY[key]) for key in before if before[key] != after[key])


def _spelling(checkpoint: Checkpoint, reading: Reading) -> dict[str, str]:
    raw = checkpoint.config
    text = raw.get("transformer_layer_config") or raw
    ids, c, names = reading.layer_ids, reading.config, reading.names
    place = ids.key.removesuffix(IDS).rstrip(".") or "top level"
    norm, residual = "input_layernorm.weight", str(c.norm_before_residual).lower()
    return {
        "architecture": ", ".join(reading.architectures) or "none",
        "tensor names": names[f"layers.0.{norm}"].removesuffix(norm) + "*",
        "layer ids": f"{list(ids.written)} ({ids.convention} ids, {place})" if ids.written else "left to the default",
        "draft_vocab_size": _shown(raw, "draft_vocab_size"),
        "num_hidden_layers": _shown(text, "num_hidden_layers"),
        "vocabulary maps": ", ".join(name for name in MAPS if name in names) or "none",
        "norm_before_residual": residual + ("" if "norm_before_residual" in raw else " by default"),
        "RoPE": ", ".join(key for key in _ROPE if key in text) or "missing",
        "max_position_embeddings": _shown(text, "max_position_embeddings"),
        "head": "its own" if c.own_head else "its embedding (tied)" if c.tied_head else "the target's",
        "weights": ", ".join(sorted({tensor.file.name for tensor in checkpoint.tensors.values()})),
    }


def _shown(source: Mapping[str, Any], key: str) -> str:
    if key not in source:
        return "missing"
    return "null" if source[key] is None else str(source[key])


def provenance(source: Checkpoint, reading: Reading, written: Checkpoint, target: Verifier | None) -> dict[str, Any]:
    """What the record says of the config: the source's, whole, and the origin of every value of the new one."""
    known: dict[str, tuple[str, Any]] = {}
    for path, value in _leaves(source.config):
        known.setdefault(path[-1], (".".join(path), value))
    derived = _derived(reading, target)
    origins = {}
    for path, value in _leaves(written.config):
        place, same = known.get(path[-1], ("", None))
        if target and "verifier" in path:
            origin = _TARGET
        elif place and value == same:
            origin = f"config.json: {place}"
        else:
            origin = derived.get(path[-1], "the dialect")
        origins[".".join(path)] = {"value": value, "from": origin}
    return {
        "made_by": f"eyas {__version__}",
        "source": {
            "folder": source.folder.resolve().name,
            "dialect": reading.dialect,
            "recognised_by": list(reading.evidence),
            "config": dict(source.config),
        },
        "config": origins,
    }


def _derived(reading: Reading, target: Verifier | None) -> dict[str, str]:
    """Where a value comes from that the source's config does not hold as it is, by its key."""
    ids, rope = reading.layer_ids, "config.json: its RoPE keys, in the other spelling"
    return {
        IDS: f"config.json: {ids.key} {list(ids.written)}, {ids.convention} ids",
        "max_position_embeddings": _TARGET if target else "the default",
        "num_hidden_layers": "the tensors",
        "draft_vocab_size": "vocab_size, where the source says nothing; null where there is no lm_head.weight",
        "head_dim": "hidden_size / num_attention_heads",
        "num_key_value_heads": "num_attention_heads",
        "target_hidden_size": "hidden_size",
        "num_aux_hidden_states": "the number of layer ids, 3 by default",
        "norm_before_residual": "what vLLM reads where a config of the source's dialect lacks the key",
        "torch_dtype": "the tensors",
        "tie_word_embeddings": "the tensors",
        **dict.fromkeys((*_ROPE, "rope_type", "type", "original_max_position_embeddings"), rope),
    }


def _leaves(config: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value
