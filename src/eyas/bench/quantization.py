"""How many bits each part of a target takes, and what its products run in: from its config, or a flag."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from eyas.core import TargetError, UsageError

_PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")


@dataclass(frozen=True)
class Format:
    """``bits`` of a weight, scales included; ``compute`` is what products run in: "bf16", "fp8", "int8" or "fp4"."""

    bits: float = 16.0
    compute: str = "bf16"


PLAIN = Format()
NAMED = {
    "bf16": PLAIN,
    "fp8": Format(8.0, "fp8"),
    "int8": Format(8.0, "int8"),
    "w8a16": Format(8.0),
    "w4a16": Format(4.125),  # a 16-bit scale for 128 weights
    "mxfp4": Format(4.25),  # an 8-bit scale for 32; with 16-bit activations, as gpt-oss runs
    "nvfp4": Format(4.5, "fp4"),  # an 8-bit scale for 16
}


@dataclass(frozen=True)
class Quantization:
    """``groups`` are formats and the modules they are for, the first that matches counts; ``kept`` stay in 16 bits."""

    name: str = "bf16"
    groups: tuple[tuple[tuple[str, ...], Format], ...] = ()
    kept: tuple[str, ...] = ()

    def of(self, module: str) -> Format:
        """Of a linear layer named as in a checkpoint: "layers.3.self_attn.q_proj", "lm_head"."""
        if any(_matches(pattern, module) for pattern in self.kept):
            return PLAIN
        for targets, format in self.groups:
            if "Linear" in targets or any(_matches(target, module) for target in targets):
                return format
        return PLAIN


def read_quantization(config: Mapping[str, Any], text: Mapping[str, Any], flag: str | None = None) -> Quantization:
    """What config.json says; ``flag`` names the format of a target that it says nothing of.

    Raises UsageError where both speak, or for an unknown flag, and TargetError for a method that is not known here.
    """
    found = next(
        (
            part[key]
            for part in (config, text)
            for key in ("quantization_config", "compression_config")
            if isinstance(part.get(key), dict)
        ),
        None,
    )
    if flag is not None:
        if flag not in NAMED:
            raise UsageError(f"--quantization is one of {', '.join(NAMED)}, got {flag!r}.")
        if found is not None:
            method = found.get("quant_method", "quantized")
            raise UsageError(f"--quantization is for a target that is not quantized yet: its config says {method}.")
        return Quantization(flag, ((("Linear",), NAMED[flag]),), ("lm_head",)) if flag != "bf16" else Quantization()
    return Quantization() if found is None else _read(found)


def _read(found: Mapping[str, Any]) -> Quantization:
    method = str(found.get("quant_method", "")).replace("_", "-")
    kept = [
        pattern
        for key in ("ignore", "ignored_layers", "exclude_modules", "modules_to_not_convert", "llm_int8_skip_modules")
        for pattern in found.get(key) or ()
        if isinstance(pattern, str)
    ]
    if method == "compressed-tensors" and isinstance(found.get("config_groups"), dict):
        return Quantization(method, tuple(_group(group) for group in found["config_groups"].values()), tuple(kept))
    if not found.get("lm_head"):
        kept.append("lm_head")
    return Quantization(method, ((("Linear",), _format(method, found)),), tuple(kept))


def _format(method: str, found: Mapping[str, Any]) -> Format:
    algorithm = str(found.get("quant_algo", "")).upper()
    if method in ("gptq", "awq", "auto-round", "gptq-marlin"):
        return Format(_bits(found.get("bits"), found.get("group_size"), method))
    if method == "bitsandbytes":
        return Format(4.5) if found.get("load_in_4bit") else NAMED["int8"]  # a 32-bit scale for 64 weights
    if method == "fp8" or (method == "modelopt" and algorithm == "FP8"):
        return NAMED["fp8"]
    if method == "mxfp4":
        return NAMED["mxfp4"]
    if method in ("modelopt", "modelopt-fp4") and algorithm in ("NVFP4", ""):
        return NAMED["nvfp4"]
    what = f"{method} {algorithm}".strip() or "no quant_method"
    raise TargetError(f"the config's quantization ({what}) is not one whose size is known here.")


def _group(group: Any) -> tuple[tuple[str, ...], Format]:
    """One of compressed-tensors' groups: products run in low precision where activations are quantized too."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise TargetError("the config's quantization has a group that does not say how weights are stored.")
    bits = _bits(weights.get("num_bits"), weights.get("group_size"), "compressed-tensors")
    compute = "bf16"
    if group.get("input_activations"):
        kinds = {(8, "float"): "fp8", (8, "int"): "int8", (4, "float"): "fp4"}
        compute = kinds.get((weights.get("num_bits"), weights.get("type")), "bf16")  # type: ignore[arg-type]
    return tuple(str(target) for target in group.get("targets") or ("Linear",)), Format(bits, compute)


def _bits(bits: Any, group_size: Any, method: str) -> float:
    if type(bits) is not int or not 0 < bits <= 16:
        raise TargetError(f"the config's quantization ({method}) does not say how many bits a weight has.")
    scale = 8.0 if (bits, group_size) == (4, 16) else 16.0  # NVFP4's are 8 bits wide
    return bits + (scale / group_size if type(group_size) is int and group_size > 0 else 0.0)


def _matches(pattern: str, module: str) -> bool:
    names = [prefix + module for prefix in _PREFIXES]
    if pattern.startswith("re:"):
        try:
            return any(re.match(pattern[3:], name) for name in names)
        except re.error as error:
            raise TargetError(f"the config's quantization has {pattern!r}, which is no pattern: {error}.") from error
    if "*" in pattern:
        return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for name in names)
    return any(f".{pattern}." in f".{name}." for name in names)
