"""A new drafter is the target's last layer on one of its states, and the target's norm and head, number for number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from zoo import case

from eyas.core import UsageError
from eyas.target.adapter import HFTarget
from eyas.target.cache import SlotCache
from eyas.target.contract import Block
from eyas.training import start

IDS = np.arange(0, 160, 2)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_it_says_what_the_target_says(name: str) -> None:
    """Fed the state that enters the last layer: then the drafter before training is the end of the target."""
    target = HFTarget(case(name).model)
    model = start.new(target, IDS, aux_layer_ids=(0, 1, 3))
    tokens = torch.tensor([case(name).prompt(7)])
    target.set_eagle3_layers_to_capture((0, 1, 3))
    cache: SlotCache = target.new_cache(8)
    out = target.forward(Block(tokens, 0, torch.zeros(1, dtype=torch.long), 7), cache)
    assert out.states is not None
    with torch.no_grad():
        got = model(model.embed(tokens), model.fuse(out.states), torch.arange(7)[None])
    torch.testing.assert_close(model.logits(got.normed), out.logits[..., IDS], rtol=1e-4, atol=1e-4)
    assert model.draft_to_target.tolist() == IDS.tolist()


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gpt2", "gemma3", "gpt-oss", "deepseek-v3", "llama4", "kimi-k2.5"])
def test_other_kinds_take_over_what_fits(name: str) -> None:
    target = HFTarget(case(name).model)
    model = start.new(target, IDS, layers=2)
    assert model.lm_head is not None
    head = target.get_embed_and_head()[1]
    assert torch.equal(model.lm_head.weight, head[IDS].float())
    assert all(bool(w.isfinite().all()) for w in model.parameters())
    norm = start.final_norm(target)
    if norm is not None and getattr(norm, "bias", None) is None:
        x = torch.randn(3, target.hidden_size)
        torch.testing.assert_close(model.norm(x), norm(x), rtol=1e-3, atol=1e-3)


def test_same_seed_same_drafter() -> None:
    target = HFTarget(case("gpt2").model)
    one, same, other = (start.new(target, IDS, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["layers.0.mlp.down_proj.weight"], other["layers.0.mlp.down_proj.weight"])


def test_states_that_are_not_there() -> None:
    target = HFTarget(case("llama").model)
    with pytest.raises(UsageError, match="from 0 to 4"):
        start.new(target, IDS, aux_layer_ids=(1, 5))
    with pytest.raises(UsageError, match="two or more"):
        start.new(target, IDS, aux_layer_ids=(3,))
