"""SGLang: its draft worker calls the drafter's forward alone, and maps draft ids to the target's itself.

srt/speculative/eagle_worker.py and eagle_worker_v2.py, srt/models/llama_eagle3.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from eyas_plugin import trace


def activate() -> None:
    trace.watch(sys.modules["sglang"], "srt/models", wrap)


def wrap(cls: type) -> None:
    if hasattr(cls, "get_hot_token_id"):
        trace.replace(cls, "forward", _forward)


def _forward(method: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            return method(self, input_ids, positions, forward_batch, *args, **kwargs)

        states = getattr(forward_batch.spec_info, "hidden_states", None)
        if not trace.recording() or states is None:
            return run()
        trace.write_drafter("sglang", self)
        if states.shape[-1] != self.config.hidden_size:  # as it decides itself whether to fuse them
            trace.write_states(states, self.config)
        output = trace.watched(self.model, run, input_ids)
        logits = getattr(output, "next_token_logits", None)
        if logits is not None:
            trace.write_logits(logits, ids=self.hot_token_id)
        return output

    return forward
