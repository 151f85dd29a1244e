"""What the draft model of one given engine cannot do, read from its source: nothing of the engine is imported.

The engines ignore config keys they do not know and drop weights without a place, so a drafter that needs more than the
installed version knows loads, and drafts nonsense. Nothing here depends on a version number.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from eyas.core import UsageError
from eyas.drafter.config import Eagle3Config

ReadSource = Callable[[str], "str | None"]  # the text of a module file such as "vllm/config/model.py", if there is one

_FILES = {"sglang": "sglang/srt/models/llama_eagle3.py", "vllm": "vllm/model_executor/models/llama_eagle3.py"}
_QWEN3 = "vllm/model_executor/models/qwen3_eagle3.py"
_STACK = re.compile(r"range\((self\.)?config\.num_hidden_layers\)")


def limits(config: Eagle3Config, dialect: str, read: ReadSource) -> list[str]:
    """Why the engine behind ``read`` cannot run this drafter, one reason each.

    Raises UsageError where it is not an engine of this dialect, or too old for EAGLE-3.
    """
    if dialect not in _FILES:
        raise UsageError(f"an engine is looked at for {' and '.join(_FILES)} only, not for the dialect {dialect!r}")
    file = _QWEN3 if dialect == "vllm" and config.qk_norm else _FILES[dialect]
    text = read(file)
    if text is None:
        raise UsageError(f"this engine has no {file}: it is not {dialect}, or too old to run this kind of drafter")
    needed = [
        key for key in ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual") if getattr(config, key)
    ]
    if config.num_aux != 3:
        needed.append("num_aux_hidden_states")
    if config.attention_bias:
        needed.append("attention_bias")
    found = [
        f"{file} of this engine does not know {key}, and would ignore it"
        for key in needed
        if not re.search(rf"\b{key}\b", text)
    ]
    if config.num_hidden_layers > 1 and not _STACK.search(text):
        found.append(f"{file} of this engine builds one layer, this drafter has {config.num_hidden_layers}")
    return found
