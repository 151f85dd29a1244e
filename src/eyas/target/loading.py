"""From a name to a target that can run. Each thing that is wrong with it is one clear error.

transformers loads generously: it invents weights that are missing, builds empty tokenizers, asks on the terminal
whether code may run. Here every one of these is an error instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.core import EyasError, TargetError, UsageError, one_line
from eyas.progress import if_slow, without_bars
from eyas.target.gguf import read_gguf_model, read_gguf_tokenizer
from eyas.target.source import Source, find_source

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

DTYPES = {"float32": ("fp32", "float"), "bfloat16": ("bf16",), "float16": ("fp16", "half")}

# How transformers names its classes with a language-model head.
GENERATING = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


@dataclass(frozen=True)
class LoadedTarget:
    """A target ready to run: in eval mode, without gradients, on its device."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    processor: ProcessorMixin | None  # of a multimodal target, if it has one and the packages it needs are installed
    name: str
    why_no_processor: str | None = None  # what to tell whoever brings an image nevertheless


def load_target(
    name: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    need_tokenizer: bool = True,
) -> LoadedTarget:
    """Load the target called ``name``: a local folder, a GGUF file, a hub id or `smollm2` (a folder: `./smollm2`).

    ``dtype`` "auto" is the checkpoint's own (float32 for a quantised GGUF file). ``device`` None is the first GPU if
    there is one, else the CPU.
    """
    dtype, device = _dtype(dtype), _device(device)
    source = find_source(name)
    # A hub's and a GGUF file's own bars are better than none, and two live lines cannot share a terminal.
    alone = source.gguf is None and Path(source.place).is_dir()
    with _explained(name), if_slow(f"loading {name}", live=alone), without_bars():
        if source.gguf:
            model, info = read_gguf_model(source.gguf, dtype=dtype, attn_implementation=attn_implementation)
            model = model.to(device)  # type: ignore[arg-type]  # transformers wraps torch's own signature away
        else:
            model, info = _read_model(source, dtype, device, trust_remote_code, attn_implementation)
        _refuse_invented_weights(info, type(model).__name__)
        tokenizer = _read_tokenizer(source, model.config, trust_remote_code, need_tokenizer)
    processor, why_not = _read_processor(source, model.config, trust_remote_code)
    return LoadedTarget(model.eval().requires_grad_(False), tokenizer, processor, name, why_not)


def _read_model(
    source: Source, dtype: Any, device: torch.device, trust_remote_code: bool, attn_implementation: str | None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    config = _read_config(source, trust_remote_code)
    model_class = _model_class(config, trust_remote_code)
    trust = {"trust_remote_code": trust_remote_code} if model_class.__name__.startswith("Auto") else {}
    return model_class.from_pretrained(
        source.place,
        config=config,
        dtype=dtype,
        device_map={"": device},
        attn_implementation=attn_implementation,
        ignore_mismatched_sizes=True,  # refused afterwards, with their names and shapes
        output_loading_info=True,
        **trust,
        **source.options,
    )


def _read_config(source: Source, trust_remote_code: bool) -> PreTrainedConfig:
    from transformers import AutoConfig, PreTrainedConfig

    raw, _ = PreTrainedConfig.get_config_dict(source.place, **source.options)
    _refuse_strangers(raw, trust_remote_code)
    config = AutoConfig.from_pretrained(source.place, trust_remote_code=trust_remote_code, **source.options)
    if config.is_encoder_decoder:
        raise TargetError(f"{config.model_type} is an encoder-decoder, and EAGLE-3 needs a decoder-only target")
    return config


def _refuse_strangers(raw: dict[str, Any], trust_remote_code: bool) -> None:
    """What no class could be found for, or must not be, by the plain content of config.json."""
    import transformers

    kind = raw.get("model_type")
    if "speculators_model_type" in raw or any("Eagle" in name for name in raw.get("architectures") or ()):
        raise TargetError("it is a drafter, not a target; give it as the drafter, beside the target it was made for")
    if not kind:
        raise TargetError("its config.json has no model_type, so it is not a transformers model")
    if kind in transformers.CONFIG_MAPPING or trust_remote_code:
        return
    if raw.get("auto_map"):
        raise TargetError(
            f"model type {kind!r} brings its own Python code, which is not run unless asked for; if you have read and "
            "trust it, pass trust_remote_code=True (--trust-remote-code)"
        )
    raise TargetError(
        f"transformers {transformers.__version__} does not know the model type {kind!r}; a newer version may "
        "(pip install --upgrade transformers)"
    )


def _model_class(config: PreTrainedConfig, trust_remote_code: bool) -> Any:
    """The class the checkpoint names, else the one of its model type: always one with a language-model head."""
    import transformers as hf

    if trust_remote_code:  # a config of the checkpoint's own class fits its own model only
        for auto in (hf.AutoModelForCausalLM, hf.AutoModelForImageTextToText):
            if auto.__name__ in (getattr(config, "auto_map", None) or {}):
                return auto
    named = (config.architectures or [""])[0]
    native = getattr(hf, named, None)
    if isinstance(native, type) and issubclass(native, hf.PreTrainedModel):
        if named.endswith(GENERATING):
            return native
        if not named.endswith("Model"):  # a bare model may do: its head can be tied to the embedding
            raise TargetError(f"it is a {named}, which has no language-model head")
    if type(config) in hf.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return hf.AutoModelForImageTextToText
    if type(config) in hf.MODEL_FOR_CAUSAL_LM_MAPPING:
        return hf.AutoModelForCausalLM
    raise TargetError(f"transformers has no text-generating class for the model type {config.model_type!r}")


def _refuse_invented_weights(info: dict[str, Any], class_name: str) -> None:
    """What transformers cannot fill, it initialises at random and mentions in a log. That is no target."""
    if mismatched := sorted(info["mismatched_keys"]):
        tensor, found, expected = mismatched[0]
        raise TargetError(
            f"its tensor {tensor} has shape {list(found)}, where its config.json asks for {list(expected)} "
            f"({len(mismatched)} such in all)"
        )
    if missing := sorted(info["missing_keys"]):
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise TargetError(f"weights that {class_name} needs are missing ({len(missing)} in all): {shown}")
    if info["error_msgs"]:
        raise TargetError("; ".join(info["error_msgs"]))


def _read_tokenizer(
    source: Source, config: PreTrainedConfig, trust_remote_code: bool, needed: bool
) -> PreTrainedTokenizerBase | None:
    from transformers import AutoTokenizer

    try:
        if source.gguf:
            return read_gguf_tokenizer(source.gguf, config)
        tokenizer = AutoTokenizer.from_pretrained(source.place, trust_remote_code=trust_remote_code, **source.options)
        # Without files some classes make do with their special tokens (and one for a space): never a real vocabulary.
        if len(tokenizer) <= len(tokenizer.all_special_tokens) + 1:
            raise TargetError("there are no tokenizer files")
        return tokenizer
    except Exception as error:
        if not needed:
            return None
        raise TargetError(f"it has no usable tokenizer: {one_line(error)}") from error


def _read_processor(
    source: Source, config: PreTrainedConfig, trust_remote_code: bool
) -> tuple[ProcessorMixin | None, str | None]:
    """A processor that cannot be had matters only once an image comes: no error here, the reason is kept for then."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoProcessor, ProcessorMixin

    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not hasattr(config, "vision_config"):
        return None, "it is a text-only model"
    try:
        processor = AutoProcessor.from_pretrained(source.place, trust_remote_code=trust_remote_code, **source.options)
    except Exception as error:
        return None, f"its processor cannot be loaded: {one_line(error)}"
    if not isinstance(processor, ProcessorMixin):
        return None, "it comes without a processor"
    return processor, None


def _dtype(wanted: str | torch.dtype) -> Any:
    import torch

    if wanted == "auto" or isinstance(wanted, torch.dtype):
        return wanted
    for name, aliases in DTYPES.items():
        if wanted == name or wanted in aliases:
            return getattr(torch, name)
    raise UsageError(f"unknown dtype {wanted!r}; choose from auto, {', '.join(DTYPES)}")


def _device(wanted: str | torch.device | None) -> torch.device:
    import torch

    if wanted is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise UsageError(f"unknown device {wanted!r}; examples: cpu, cuda, cuda:1") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"there is no device {str(device)!r}: torch sees {torch.cuda.device_count()} CUDA devices here"
        )
    return device


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Other libraries' loaders raise anything: the caller gets one sentence, with the original as its cause."""
    try:
        yield
    except EyasError as error:
        raise TargetError(f"cannot load {name!r}: {error}") from error.__cause__
    except Exception as error:
        raise TargetError(f"cannot load {name!r}: {one_line(error)}") from error
