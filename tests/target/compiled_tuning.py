"""For test_tuning.py, in a process of its own: tiny tuned Llamas compiled as one graph each, against plain ones."""

import copy
import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import transformers
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).parents[1]))
import zoo

from eyas.target import packing, tuning
from eyas.target.compiling import compiled as compile_step

found: Counter[str] = Counter()
packed_copy = packing._packed_copy


def counting(weights: list[torch.Tensor], biases: list[torch.Tensor | None]) -> packing._Packed | None:
    packed = packed_copy(weights, biases)
    found["stale" if packed is None else "packed"] += 1
    return packed


def observe(dtype: torch.dtype, grad_mode: Callable[[], AbstractContextManager[None]]) -> dict[str, object]:
    """How far the compiled, tuned model is from the plain one (in their spread), and which weights it found."""
    config = transformers.LlamaConfig(**zoo.DENSE | {"num_hidden_layers": 1})
    plain = zoo.enliven(transformers.LlamaForCausalLM(config)).to(dtype).requires_grad_(False)
    tuned = copy.deepcopy(plain)
    linears = tuning.tune(tuned, smallest=0).packed

    def step(tokens: torch.Tensor, places: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return tuned(input_ids=tokens, position_ids=places, attention_mask=mask, use_cache=False).logits

    compiled = compile_step(step)
    with grad_mode():
        tokens = torch.arange(12).view(2, 6) * 7 % zoo.WORDS
        places = torch.arange(6).expand(2, -1).contiguous()
        mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
        want = plain(input_ids=tokens, position_ids=places, attention_mask=mask, use_cache=False).logits.float()

        def off(factor: float) -> float:
            found.clear()
            got = compiled(tokens, places, mask).float()
            return float((got - factor * want).square().mean().sqrt() / want.std())

        first = off(1.0)
        packed, stale = found["packed"], found["stale"]
        tuned.lm_head.weight.mul_(2.0)  # the compiled graph multiplies by what the weight is now
        second = off(2.0)
    return {"off": [first, second], "found": [packed, stale, found["packed"], found["stale"]], "linears": linears}


if __name__ == "__main__":
    packing._packed_copy = counting
    modes = {torch.float32: torch.no_grad, torch.bfloat16: torch.inference_mode}
    seen = {str(dtype): observe(dtype, mode) for dtype, mode in modes.items() if packing._packs(dtype)}
    cache = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss")}
    print(json.dumps({"seen": seen, **cache}))
