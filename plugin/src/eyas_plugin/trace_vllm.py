"""vLLM: its proposer fuses the captured states, runs the drafter and asks for logits, each by a method of the drafter.

v1/spec_decode/llm_base_proposer.py, propose.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from eyas_plugin import trace

_IDS = "_eyas_traced_ids"


def activate() -> None:
    trace.watch(sys.modules["vllm"], "model_executor/models", wrap)


def wrap(cls: type) -> None:
    if hasattr(cls, "combine_hidden_states") and hasattr(cls, "compute_logits"):
        trace.replace(cls, "combine_hidden_states", _combine)
        if hasattr(cls, "embed_input_ids"):  # older versions have another name for it
            trace.replace(cls, "embed_input_ids", _embed)
        trace.replace(cls, "forward", _forward)
        trace.replace(cls, "compute_logits", _logits)


def _combine(method: Callable[..., Any]) -> Callable[..., Any]:
    def combine_hidden_states(self: Any, hidden_states: Any) -> Any:
        if trace.recording():
            trace.write_drafter("vllm", self)
            trace.write_states(hidden_states, self.config)
        return method(self, hidden_states)

    return combine_hidden_states


def _embed(method: Callable[..., Any]) -> Callable[..., Any]:
    """For a multimodal target, the drafter's forward gets embeddings without ids."""

    def embed_input_ids(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if trace.recording():
            self.__dict__[_IDS] = input_ids.clone()
        return method(self, input_ids, *args, **kwargs)

    return embed_input_ids


def _forward(method: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if not trace.recording():
            return method(self, input_ids, *args, **kwargs)
        tokens = self.__dict__[_IDS] if input_ids is None else input_ids
        return trace.watched(self.model, lambda: method(self, input_ids, *args, **kwargs), tokens)

    return forward


def _logits(method: Callable[..., Any]) -> Callable[..., Any]:
    def compute_logits(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        logits = method(self, hidden_states, *args, **kwargs)
        if trace.recording() and logits is not None:
            trace.write_logits(logits, hidden_states)
        return logits

    return compute_logits
