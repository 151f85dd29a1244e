"""Runs in vLLM's environment: a real drafter class, called as the proposer calls it, without and with a trace.

in_vllm_trace.py TARGET DRAFTER FOLDER: prints one JSON object. Attention is stood in for: there is no KV cache here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import in_vllm
import torch


class Attention(torch.nn.Module):
    """Each slot sees itself."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.proj = torch.nn.Linear(width, size)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.proj(hidden_states)


def main(target: str, drafter: str, folder: str) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = in_vllm.engine_config(target, drafter, enforce_eager=True)
    in_vllm.construct(config)  # one rank, and the target, which the drafter's layers are counted behind
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        model = initialize_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
    model.model.layers[0].self_attn = Attention(64, 32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        model.draft_id_to_target_id.copy_(torch.arange(len(model.draft_id_to_target_id)))  # target id = 2 i
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    states = torch.randn(5, 3 * 32, generator=generator)
    tokens, positions = torch.tensor([3, 1, 4, 1, 5]), torch.arange(7, 12)

    def propose() -> list[torch.Tensor]:
        with torch.inference_mode(), set_forward_context(None, config, num_tokens=5):
            hidden = model.combine_hidden_states(states)
            last, carried = model(input_ids=tokens, positions=positions, hidden_states=hidden)
            logits = model.compute_logits(last[-1:])
        return [hidden, last, carried, logits]

    plain = propose()
    Path(folder).mkdir()
    watched = propose()
    same = all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    Path(folder).rename(folder + "-kept")
    propose()  # the folder is gone: nobody wants to know any more
    hidden, last, _, logits = plain
    best = logits[0].topk(8)
    embedded = model.model.embed_tokens(tokens)
    return {
        "class": type(model).__name__,
        "same": same,
        "norms": {
            "states": [part.norm(dim=-1).tolist() for part in states.split(32, dim=-1)],
            "entering": hidden.norm(dim=-1).tolist(),
            "embedding": embedded.norm(dim=-1).tolist(),
            "normed": last.norm(dim=-1).tolist(),
        },
        "top": list(zip(best.indices.tolist(), best.values.tolist(), strict=True)),
    }


if __name__ == "__main__":
    print("\n" + json.dumps(main(*sys.argv[1:])))
