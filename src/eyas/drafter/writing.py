"""How a drafter is spelled when it is written: tensor names and config.json of each dialect, and what it cannot say.

The inverse of ``dialects``. Facts from the readers: official EAGLE eagle/model/cnets.py and ea_model.py; sglang 0.5.23
srt/models/llama_eagle3.py and llama.py (set_embed); vllm 0.32 models/llama_eagle3.py, v1/spec_decode/
llm_base_proposer.py (what it shares with the target) and transformers_utils/configs/speculators.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from eyas.drafter import vocabulary
from eyas.drafter.config import Eagle3Config
from eyas.drafter.dialects import IDS

DIALECTS = ("eagle", "sglang", "vllm")
_ARCHITECTURE = {"eagle": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle3", "vllm": "Eagle3DraftModel"}
_SPECULATIVE_TOKENS = 5  # speculators' own default, and what vLLM drafts when nothing else is said
_NORMS = ("fc_norm", "norm_before_fc", "norm_output")


def tensor_name(name: str, dialect: str) -> str:
    """The inverse of ``dialects.eyas_name``.

    "midlayer" loads in all versions of SGLang, "layers.0" only in recent ones; its further layers norm their input with
    hidden_norm where vLLM has input_layernorm.
    """
    if dialect == "vllm":
        return name
    if name.startswith("layers.0."):
        return name.replace("layers.0.", "midlayer.", 1)
    return re.sub(r"^(layers\.\d+)\.input_layernorm\.", r"\1.hidden_norm.", name)


def config_json(
    config: Eagle3Config, dialect: str, dtype: str, verifier: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config.json of ``config`` in ``dialect``, which must be able to say it (``cannot_say``).

    ``verifier`` is what a speculators config says of the target: name_or_path and architectures.
    """
    if dialect == "vllm":
        return _speculators_config(config, dtype, verifier or {"name_or_path": None, "architectures": []})
    written = {"architectures": [_ARCHITECTURE[dialect]], "model_type": "llama", **_sizes(config), "torch_dtype": dtype}
    return written | (_eagle_keys(config) if dialect == "eagle" else _sglang_keys(config))


def cannot_say(config: Eagle3Config, dialect: str, reordered: bool = False) -> list[str]:
    """Why the destination would compute something else, one reason each; empty when it can run this drafter.

    ``reordered``: the draft vocabulary is the target's in another order, which takes a d2t of full size.
    """
    checks = {"eagle": _not_in_eagle, "sglang": _not_in_sglang, "vllm": _not_in_vllm}[dialect](config)
    if reordered and dialect != "sglang":
        owner = {"eagle": "official EAGLE drops", "vllm": "vLLM refuses"}[dialect]
        checks.append(
            (True, f"{owner} d2t where the draft vocabulary is as large as the target's; here it reorders it")
        )
    return [why for applies, why in checks if applies]


def vocabulary_maps(ids: vocabulary.Ids, vocab_size: int) -> dict[str, NDArray[Any]]:
    """d2t and t2d for target ids [D], only where they say something: vLLM refuses them for a full vocabulary."""
    d2t = vocabulary.offsets_from_ids(ids)
    if len(ids) == vocab_size and not d2t.any():
        return {}
    return {"d2t": d2t, "t2d": vocabulary.membership(ids, vocab_size)}


def _not_in_sglang(c: Eagle3Config) -> list[tuple[bool, str]]:
    return [
        (c.norm_before_residual, "SGLang has no norm_before_residual: it adds to the state before the norm"),
        (c.qk_norm, "SGLang's draft layer has no q_norm and k_norm, and drops their weights silently"),
        (c.attention_bias, "SGLang's draft layer has no attention bias, and drops these weights silently"),
    ]


def _not_in_vllm(c: Eagle3Config) -> list[tuple[bool, str]]:
    return [
        (not c.has_fc, "vLLM always applies fc, and this drafter takes the target's state without one"),
        (
            c.tied_head,
            "vLLM knows no tied head, and takes the target's head for a missing one; without an embedding of its own "
            "there is nothing to write as lm_head.weight",
        ),
    ]


def _not_in_eagle(c: Eagle3Config) -> list[tuple[bool, str]]:
    extra = [key for key in (*_NORMS, "norm_before_residual", "qk_norm", "attention_bias") if getattr(c, key)]
    scaled = c.rope["rope_type"] != "default"
    unscaled_base = c.rope["rope_type"] == "linear" and c.rope["rope_theta"] == 10000
    return [
        (bool(extra), f"official EAGLE has no {', '.join(extra)}"),
        (c.num_hidden_layers != 1, f"official EAGLE has one layer, this drafter has {c.num_hidden_layers}"),
        (c.num_aux != 3, f"official EAGLE takes three states of the target, this drafter {c.num_aux}"),
        (
            c.aux_layer_ids is not None,
            f"official EAGLE always takes the states entering layers [2, n // 2, n - 3], this drafter those entering "
            f"{list(c.aux_layer_ids or ())}; if that is the same for its target, say which target it is",
        ),
        (
            not c.own_head,
            "official EAGLE needs an lm_head.weight of the drafter's own, and starts from random numbers without one",
        ),
        (
            scaled and not unscaled_base,
            f"official EAGLE knows rope_type 'default', or 'linear' with rope_theta 10000; this drafter has "
            f"{c.rope['rope_type']!r} with rope_theta {c.rope['rope_theta']:g}",
        ),
    ]


def _sizes(c: Eagle3Config) -> dict[str, Any]:
    kind, theta = c.rope["rope_type"], c.rope["rope_theta"]
    return {
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "rms_norm_eps": c.rms_norm_eps,
        "hidden_act": c.hidden_act,
        "max_position_embeddings": c.max_position_embeddings,
        # transformers 4 reads the first two, 5 the third
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else {k: v for k, v in c.rope.items() if k != "rope_theta"},
        "rope_parameters": dict(c.rope),
        "attention_bias": c.attention_bias,
        "tie_word_embeddings": c.tied_head,
    }


def _eagle_keys(c: Eagle3Config) -> dict[str, Any]:
    """With target_hidden_size in its config, official EAGLE no longer takes the target's embedding (cnets.py)."""
    keys: dict[str, Any] = {"draft_vocab_size": c.draft_vocab_size}
    if c.hidden_size != c.target_hidden_size:
        keys["target_hidden_size"] = c.target_hidden_size
    if c.rope["rope_type"] == "linear":  # its EConfig wants exactly these two keys
        keys["rope_scaling"] = {"type": "linear", "factor": c.rope["factor"]}
    return keys


def _sglang_keys(c: Eagle3Config) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "target_hidden_size": c.target_hidden_size,
        # null: SGLang shares the target's head; without the key it fails
        "draft_vocab_size": None if not c.own_head and not c.tied_head else c.draft_vocab_size,
        "num_aux_hidden_states": c.num_aux,
    }
    for flag in _NORMS:
        if getattr(c, flag):  # written only when set: SpecForge reads an explicit norm_output false as "no final norm"
            keys[flag] = True
    if c.aux_layer_ids is not None:
        keys["eagle_config"] = {IDS: [i - 1 for i in c.aux_layer_ids], "use_aux_hidden_state": True}
    return keys


def _speculators_config(c: Eagle3Config, dtype: str, verifier: Mapping[str, Any]) -> dict[str, Any]:
    """No model_type at the top: its absence is how vLLM recognises a speculators config (transformers_utils/config.py).

    num_aux_hidden_states stands beside the sizes, since vLLM copies no such key from the top, and its Llama drafter
    takes the number of states from nowhere else (llama_eagle3.py; vllm issue 54526).
    """
    layer = {"model_type": "qwen3" if c.qk_norm else "llama", **_sizes(c), "num_aux_hidden_states": c.num_aux}
    written = {
        "architectures": [_ARCHITECTURE["vllm"]],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _SPECULATIVE_TOKENS}],
            "default_proposal_method": "greedy",
            "verifier": dict(verifier),
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        "norm_before_residual": c.norm_before_residual,
        **{flag: getattr(c, flag) for flag in _NORMS},
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
    return written if c.aux_layer_ids is None else written | {IDS: list(c.aux_layer_ids)}
