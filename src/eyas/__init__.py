"""Eyas: EAGLE-3 speculative decoding that works on the first try and says honestly whether it pays.

::

    import eyas

    llm = eyas.load("smollm2", drafter="path/to/drafter")
    for chunk in llm.stream("The falcon"):
        print(chunk.text, end="")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from eyas.core import DraftShape, EyasError, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from eyas.engine.custom_generate import custom_generate
    from eyas.engine.llm import LLM, Completion, load

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Completion",
    "DraftShape",
    "EyasError",
    "SamplingParams",
    "StructuredOutputsParams",
    "custom_generate",
    "load",
]

# These need torch, which takes seconds to import: only when asked for.
_LAZY = {
    "LLM": "eyas.engine.llm",
    "Completion": "eyas.engine.llm",
    "load": "eyas.engine.llm",
    "custom_generate": "eyas.engine.custom_generate",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'eyas' has no attribute {name!r}")
