"""Runs in an environment of SGLang: its real drafter class, called as the draft worker does, with and without trace.

in_sglang_trace.py TARGET DRAFTER FOLDER: prints one JSON object. Attention and the head's kernels are stood in for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import in_sglang
import torch

DRAFTED = 48  # tokens; the head has padding behind them


class Attention(torch.nn.Module):
    """Each slot sees itself: kernels for more are not here."""

    def __init__(self, width: int, size: int):
        super().__init__()
        self.proj = torch.nn.Linear(width, size)

    def forward(self, positions: Any, hidden_states: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        return self.proj(hidden_states)


class Head(torch.nn.Module):
    def forward(self, ids: Any, hidden: torch.Tensor, head: Any, batch: Any, aux: Any) -> Any:
        return SimpleNamespace(next_token_logits=hidden[-1:] @ head.weight[:DRAFTED].T, hidden_states=aux[0])


def main(target: str, drafter: str, folder: str) -> dict[str, Any]:
    arguments, _ = in_sglang.begin(drafter, target)
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.models import registry  # noqa: F401  (where versions without plugins let the plugin in)
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3

    config = ModelConfig.from_server_args(arguments, model_path=drafter, is_draft_model=True).hf_config
    model = LlamaForCausalLMEagle3(config)
    model.logits_processor = Head()
    network = model.model
    layer = network.layers[0] if hasattr(network, "layers") else network.midlayer
    layer.self_attn = Attention(64, 32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.hot_token_id = 2 * torch.arange(config.draft_vocab_size)
    states = torch.randn(5, 3 * 32, generator=generator)
    tokens, positions = torch.tensor([3, 1, 4, 1, 5]), torch.arange(7, 12)
    mode = SimpleNamespace(is_extend=lambda: False)
    batch = SimpleNamespace(spec_info=SimpleNamespace(hidden_states=states), mm_input_embeds=None, forward_mode=mode)

    def draft() -> list[torch.Tensor]:
        with torch.inference_mode():
            output = model.forward(tokens, positions, batch)
        return [output.next_token_logits, output.hidden_states]

    plain = draft()
    Path(folder).mkdir()
    watched = draft()
    same = all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    Path(folder).rename(folder + "-kept")
    draft()
    best = plain[0][0].topk(8)
    return {
        "class": type(model).__name__,
        "same": same,
        "norms": {
            "states": [part.norm(dim=-1).tolist() for part in states.split(32, dim=-1)],
            "entering": network.fc(states).norm(dim=-1).tolist(),
            "embedding": network.embed_tokens(tokens).norm(dim=-1).tolist(),
        },
        "top": list(zip((2 * best.indices).tolist(), best.values.tolist(), strict=True)),
    }


if __name__ == "__main__":
    print("\n" + json.dumps(main(*sys.argv[1:])))
