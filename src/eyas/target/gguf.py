"""GGUF files, read through transformers and always unpacked to plain weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.core import TargetError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def read_gguf_model(
    path: Path, *, dtype: torch.dtype | str, attn_implementation: str | None = None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model in the file and transformers' loading report.

    Its q and k rows are back in the order transformers uses (once), and a tied head stays tied.
    """
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=dtype,
            attn_implementation=attn_implementation,
            output_loading_info=True,
            **_unpacked(),
        )
    except Exception as error:  # a truncated file fails wherever its reader happens to be
        raise TargetError(f"the GGUF file is truncated, damaged or of an unsupported kind ({error})") from error
    return loaded


def read_gguf_tokenizer(path: Path, config: PreTrainedConfig) -> PreTrainedTokenizerBase:
    """The tokenizer in the file, with the special tokens of ``config``: older transformers give it those of Llama."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for kind in ("bos", "eos", "unk", "pad"):
        if (index := getattr(config, f"{kind}_token_id", None)) is not None:
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(index))
    return tokenizer


def _unpacked() -> dict[str, Any]:
    """Newer transformers may keep the blocks packed where a kernel is installed: then no two machines compute alike."""
    from transformers.utils import quantization_config

    config = getattr(quantization_config, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}
