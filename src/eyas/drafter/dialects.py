"""How checkpoints spell a drafter: official EAGLE, SGLang/SpecForge, and vLLM speculators, read into one description.

Facts from the engines' readers: sglang 0.5.23 srt/models/llama_eagle3.py and
model_runner_components/spec_aux_hidden_state.py; vllm 0.32 models/llama_eagle3.py, models/qwen3_eagle3.py and
transformers_utils/configs/speculators/algos.py; speculators 0.9 models/eagle3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from eyas.core import CheckpointError
from eyas.drafter import vocabulary
from eyas.drafter.checkpoint import Checkpoint
from eyas.drafter.config import Eagle3Config, tensor_shapes

IDS = "eagle_aux_hidden_state_layer_ids"
MAPS = ("d2t", "t2d")
_COUNTS = {"num_hidden_layers": 128, "num_aux_hidden_states": 64}  # more than any drafter has
_SPECULATORS_KEYS = ("speculators_model_type", "speculators_config", "transformer_layer_config")
_ARCHITECTURES = (
    "LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM",
    "Eagle3DraftModel", "Eagle3Speculator",
)  # fmt: skip

# Keys that change what is computed without showing in the tensors: values that are harmless, what any other means.
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "parallel_drafting": ((None, False), "parallel drafting (P-EAGLE)"),
    "pard_token": ((None,), "parallel drafting (P-EAGLE)"),
    "ptd_token_id": ((None,), "parallel drafting (P-EAGLE)"),
    "mask_token_id": ((None,), "parallel or block drafting"),
    "dflash_config": ((None,), "block drafting (DFlash)"),
    "parallel_draft_step": ((None, 0, 1), "parallel drafting"),
    "use_input_layernorm_in_first_layer": ((None, True), "a first layer without input_layernorm"),
    "use_last_layernorm": ((None, True), "a head without the final norm"),
    "use_mtp_layernorm": ((None, False), "a norm between drafting steps"),
    "partial_rotary_factor": ((None, 1), "rotating only a part of each head"),
    "logit_scale": ((None, 1), "scaled logits"),
    "final_logit_softcapping": ((None, 0), "soft-capped logits"),
    "attn_logit_softcapping": ((None, 0), "soft-capped attention"),
    "use_sliding_window": ((None, False), "sliding-window attention"),
}


@dataclass(frozen=True)
class LayerIds:
    """Auxiliary layers as a config writes them. ``convention`` is "entry", "output" (entry id - 1), or "default"."""

    written: tuple[int, ...]
    convention: str
    key: str

    @property
    def entry(self) -> tuple[int, ...] | None:
        """Entry ids, ascending: every engine concatenates the states in layer order, whatever the list's order."""
        if self.convention == "default":
            return None
        return tuple(sorted(i + (self.convention == "output") for i in self.written))

    @property
    def output(self) -> tuple[int, ...] | None:
        return None if self.entry is None else tuple(i - 1 for i in self.entry)


@dataclass(frozen=True)
class Reading:
    """A checkpoint understood. ``names`` maps Eyas's tensor names to the files'; ``problems`` why it cannot run."""

    dialect: str
    evidence: tuple[str, ...]
    architectures: tuple[str, ...]
    config: Eagle3Config
    layer_ids: LayerIds
    names: Mapping[str, str]
    problems: tuple[str, ...]
    refused: bool = False  # a drafter of a kind that Eyas does not run; an engine may


def read(checkpoint: Checkpoint) -> Reading:
    """Config, tensor names and vocabulary maps of ``checkpoint``, from headers and the maps alone.

    Raises CheckpointError where the config lacks a size; all else that is wrong is collected in ``problems``.
    """
    raw, file = checkpoint.config, checkpoint.folder / "config.json"
    try:
        dialect, evidence = recognise(raw)
        text = _mapping(raw, "transformer_layer_config") or raw
        architectures = _architectures(raw) or _architectures(text)
        ids = _layer_ids(raw, text, dialect)
        config = _config(raw, text, dialect, ids)
        refused = [f"{file}: {why}" for why in _refusals(raw, text, architectures)]
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error
    names, problems = _names(checkpoint, dialect)
    has = names.__contains__
    tied = bool(text.get("tie_word_embeddings")) and not has("lm_head.weight")
    config = replace(config, own_embedding=has("embed_tokens.weight"), own_head=has("lm_head.weight"), tied_head=tied)
    if not refused:  # a drafter of another kind would fail every check below for one and the same reason
        problems += [f"{file}: {why}" for why in config.problems()]
        problems += _tensor_problems(checkpoint, config, names)
        problems += _map_problems(checkpoint, config, names)
    return Reading(dialect, evidence, architectures, config, ids, names, tuple(refused or problems), bool(refused))


def for_target(reading: Reading, layers: int | None) -> Reading:
    """``reading`` as a target of so many layers decides it: an id equal to their number can only be an entry id."""
    ids = reading.layer_ids
    if ids.convention != "output" or max(ids.written) != layers:
        return reading
    entry = replace(ids, convention="entry")
    return replace(reading, layer_ids=entry, config=replace(reading.config, aux_layer_ids=entry.entry))


def recognise(raw: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The dialect of a config, and what in it says so."""
    keys = [key for key in _SPECULATORS_KEYS if key in raw]
    if keys:
        return "vllm", tuple(f"config key {key}" for key in keys)
    architectures = _architectures(raw)
    evidence = [f"architecture {name}" for name in architectures if name.endswith("Eagle3")]
    if raw.get("eagle_config"):
        evidence.append("config key eagle_config")
    if evidence:
        return "sglang", tuple(evidence)
    evidence = [f"architecture {name}" for name in architectures if name.startswith("Eagle3")]
    if raw.get(IDS):
        evidence.append(f"top-level {IDS}")
    if evidence:
        return "vllm", tuple(evidence)
    return "eagle", (f"architecture {', '.join(architectures) or 'none'} and no auxiliary layer ids in the config",)


def norm_before_residual(raw: Mapping[str, Any]) -> bool:
    """vLLM takes a speculators config without the key for True (algos.py), any other config for False."""
    missing_means = any(key in raw for key in _SPECULATORS_KEYS)
    return bool(raw.get("norm_before_residual", missing_means))


def eyas_name(name: str, dialect: str) -> str | None:
    """Eyas's name of a checkpoint's tensor; None for buffers that hold nothing a drafter needs."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    if "rotary_emb." in name:
        return None
    for index, level in enumerate(("low", "mid", "high")):  # SGLang's older names
        name = name.replace(f"aux_norm_{level}.", f"fc_norm.{index}.")
    if dialect == "sglang":  # SGLang calls the attention norm of further layers hidden_norm, vLLM input_layernorm
        name = re.sub(r"^(layers\.[1-9]\d*)\.hidden_norm\.", r"\1.input_layernorm.", name)
    return name


def _config(raw: Mapping[str, Any], text: Mapping[str, Any], dialect: str, ids: LayerIds) -> Eagle3Config:
    numbers = _Numbers(text)
    hidden = numbers.positive("hidden_size")
    heads = numbers.positive("num_attention_heads")
    vocab = numbers.positive("vocab_size")
    max_positions = numbers.positive("max_position_embeddings", 2048)
    eps = text.get("rms_norm_eps", 1e-6)
    nested = _mapping(raw, "eagle_config")
    outer = _Numbers(raw)
    config = Eagle3Config(
        hidden_size=hidden,
        target_hidden_size=outer.positive("target_hidden_size", hidden),
        intermediate_size=numbers.positive("intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=numbers.positive("num_key_value_heads", heads),
        head_dim=numbers.positive("head_dim", max(1, hidden // heads)),
        vocab_size=vocab,
        draft_vocab_size=outer.positive("draft_vocab_size", vocab),
        # the official trainer copies the target's count, and its model has one layer whatever the config says
        num_hidden_layers=1 if dialect == "eagle" else numbers.positive("num_hidden_layers", 1),
        # inside transformer_layer_config too: of a speculators config vLLM takes further keys from there only
        num_aux=(outer if raw.get("num_aux_hidden_states") else numbers).positive(
            "num_aux_hidden_states", len(ids.written) or 3
        ),
        aux_layer_ids=ids.entry,
        rms_norm_eps=eps if isinstance(eps, int | float) else math.nan,  # refused by the checks on the config
        hidden_act=str(text.get("hidden_act", "silu")),
        rope=_rope(text, max_positions),
        max_position_embeddings=max_positions,
        attention_bias=bool(text.get("attention_bias")),
        qk_norm=text.get("model_type") == "qwen3",
        fc_norm=bool(raw.get("fc_norm") or raw.get("use_aux_norm")),
        norm_before_fc=bool(nested.get("norm_before_fc", raw.get("norm_before_fc"))),
        norm_output=bool(raw.get("norm_output")),
        norm_before_residual=norm_before_residual(raw),
        dialect=dialect,
    )
    wrong = numbers.wrong + outer.wrong
    if wrong:
        raise CheckpointError("; ".join(wrong))
    return config


class _Numbers:
    """Reads positive integers from a config and collects what is not one."""

    def __init__(self, source: Mapping[str, Any]):
        self.source, self.wrong = source, list[str]()

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.source.get(key)
        value = default if value is None else value
        most = _COUNTS.get(key, 1 << 31)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most:
            return value
        found = "nothing" if value is None else repr(value)[:100]
        limit = f" up to {most}" if isinstance(value, int) and value > most else ""
        self.wrong.append(f"{key}: expected a positive integer{limit}, found {found}")
        return 1


def _layer_ids(raw: Mapping[str, Any], text: Mapping[str, Any], dialect: str) -> LayerIds:
    """Nested under eagle_config they are output ids (SGLang adds 1), at the top level entry ids (vLLM, speculators)."""
    places = [
        (_mapping(raw, "eagle_config"), "output", f"eagle_config.{IDS}"),
        (raw, "entry", IDS),
        (text, "entry", f"transformer_layer_config.{IDS}"),
    ]
    for source, convention, key in places if dialect == "sglang" else places[1:] + places[:1]:
        written = source.get(IDS)
        if not written:  # missing, null or []: every engine falls back to the default
            continue
        if not isinstance(written, list) or not all(type(i) is int for i in written):
            raise CheckpointError(f"{key}: expected a list of integers, found {written!r}")
        return LayerIds(tuple(written), convention, key)
    return LayerIds((), "default", "")


def _rope(text: Mapping[str, Any], max_positions: int) -> dict[str, Any]:
    """One spelling for transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters, perhaps by layer type)."""
    newer = _mapping(text, "rope_parameters")
    newer = _mapping(newer, "full_attention") or newer
    rope = {"rope_theta": text.get("rope_theta", 10000.0), **_mapping(text, "rope_scaling"), **newer}
    old_kind = rope.pop("type", None)
    kind = rope.pop("rope_type", None) or old_kind or "default"
    if rope.pop("mrope_section", None) is not None or kind == "mrope":
        kind = "default"  # the axes of multi-axis RoPE agree on text, which is all that is drafted
    rope = {key: value for key, value in rope.items() if value is not None}
    if kind == "yarn":
        rope.setdefault("original_max_position_embeddings", max_positions)
    return {"rope_type": kind, **rope}


def _refusals(raw: Mapping[str, Any], text: Mapping[str, Any], architectures: tuple[str, ...]) -> list[str]:
    """Why this is a drafter of a kind that Eyas does not run, one sentence each."""
    found = [
        f"architecture {name} is not supported (supported: {', '.join(_ARCHITECTURES)})"
        for name in architectures
        if name not in _ARCHITECTURES
    ]
    kind = raw.get("speculators_model_type") or _mapping(raw, "speculators_config").get("algorithm") or "eagle3"
    if kind != "eagle3":
        found.append(f"speculators model type {kind!r} is not supported; Eyas runs 'eagle3'")
    if text.get("model_type", "llama") not in ("llama", "qwen3"):
        found.append(f"model_type {text['model_type']!r} is not supported (supported: 'llama', 'qwen3')")
    if _mapping(raw, "eagle_config").get("use_aux_hidden_state", True) is False:
        found.append("use_aux_hidden_state is false: this is an EAGLE-1 type drafter on the last state alone")
    if "sliding_attention" in (text.get("layer_types") or []):
        found.append("layer_types holds sliding_attention: a sliding-window drafter is not supported")
    everywhere = {**_mapping(text, "rope_parameters"), **text, **raw, **_mapping(raw, "eagle_config")}
    found += [
        f"{key} is {everywhere[key]!r}: {meaning} is not supported"
        for key, (harmless, meaning) in _UNSUPPORTED.items()
        if everywhere.get(key) not in harmless
    ]
    return found


def _mapping(source: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = source.get(key)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{key}: expected an object, found {value!r}")
    return value or {}


def _architectures(source: Mapping[str, Any]) -> tuple[str, ...]:
    value = source.get("architectures") or []
    return tuple(map(str, value)) if isinstance(value, list) else (str(value),)


def _names(checkpoint: Checkpoint, dialect: str) -> tuple[dict[str, str], list[str]]:
    names: dict[str, str] = {}
    problems = []
    for original, tensor in checkpoint.tensors.items():
        name = eyas_name(original, dialect)
        if name is None:
            continue
        if name in names:
            problems.append(f"{tensor.file}: {original} and {names[name]} are the same tensor; remove one")
        names.setdefault(name, original)
    return names, problems


def _tensor_problems(checkpoint: Checkpoint, config: Eagle3Config, names: Mapping[str, str]) -> list[str]:
    """Tensors missing, of another shape or type than the config says, or that nothing uses."""
    weights = {name: checkpoint.tensors[names[name]] for name in names if name not in MAPS}
    where = next(iter(checkpoint.tensors.values())).file if checkpoint.tensors else checkpoint.path
    if config.has_fc and "fc.weight" not in weights:
        return [f"{where}: expected fc.weight, found none: this is not an EAGLE-3 drafter (a whole model? an EAGLE-1?)"]
    shapes = tensor_shapes(config)
    problems = []
    for name, shape in shapes.items():
        if name not in weights:
            problems.append(f"{where}: {name}: expected {list(shape)}, found no such tensor; the drafter is incomplete")
            continue
        tensor = weights[name]
        if tensor.shape != shape:
            problems.append(
                f"{tensor.file}: {names[name]}: expected {list(shape)} from config.json, found {list(tensor.shape)}; "
                "config and weights are of different drafters"
            )
        elif tensor.dtype not in ("F32", "F16", "BF16"):
            problems.append(
                f"{tensor.file}: {names[name]}: expected BF16, F16 or F32, found {tensor.dtype}; quantised drafters "
                "are not supported"
            )
    problems += [
        f"{weights[name].file}: {names[name]} {list(weights[name].shape)}: nothing in this drafter uses it; "
        "config and weights are of different drafters"
        for name in sorted(weights.keys() - shapes.keys())
    ]
    return problems


def _map_problems(checkpoint: Checkpoint, config: Eagle3Config, names: Mapping[str, str]) -> list[str]:
    if "d2t" not in names:
        if config.draft_vocab_size == config.vocab_size:
            return []
        return [
            f"{checkpoint.path}: expected d2t [{config.draft_vocab_size}], found none: without it the "
            f"{config.draft_vocab_size} draft tokens cannot be told apart among the target's {config.vocab_size}"
        ]
    maps = {}
    for name, kinds in (("d2t", ("I64", "I32")), ("t2d", ("BOOL", "U8"))):
        if name in names:
            tensor = checkpoint.tensors[names[name]]
            if tensor.dtype not in kinds:
                return [f"{tensor.file}: {names[name]}: expected {' or '.join(kinds)}, found {tensor.dtype}"]
            maps[name] = checkpoint.array(names[name])
    where = checkpoint.tensors[names["d2t"]].file
    return [
        f"{where}: {why}"
        for why in vocabulary.problems(maps["d2t"], maps.get("t2d"), config.draft_vocab_size, config.vocab_size)
    ]
