"""GGUF files, read through transformers and always unpacked to plain weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def read_gguf_model(
    path: Path, *, dtype: torch.dtype | str, attn_implementation: str | None = None
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model in the file and transformers' loading report.

    Its q and k rows are back in the order transformers uses (once), and a tied head stays tied.
    """
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=dtype,
        attn_implementation=attn_implementation,
        output_loading_info=True,
        **_unpacked(),
    )
    return loaded


def read_gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def _unpacked() -> dict[str, Any]:
    """Newer transformers may keep the blocks packed where a kernel is installed: then no two machines compute alike."""
    from transformers.utils import quantization_config

    config = getattr(quantization_config, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}
