"""A tuned model against the same model untouched."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
import zoo
from torch import nn

from eyas.target import tuning
from eyas.target.packing import PackedLinear, _packed_copy, _packs
from eyas.target.tuning import ATTENTION, grouped_attention, tune

SDPA_WITH_GROUPS = {"llama", "mistral", "qwen2", "qwen3", "gemma3", "qwen2.5-vl", "llama4", "gemma3-vl"}
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 5]


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def supported(dtype: torch.dtype) -> None:
    if not _packs(dtype):
        pytest.skip(f"oneDNN does not pack {dtype} on this machine")


def current(made: nn.Linear) -> bool:
    return _packed_copy([made.weight], [made.bias]) is not None


# Attention


def by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    """Attention in float64, one query at a time; head h reads key head h // (heads per group)."""
    batch, heads, count, _ = query.shape
    per_group = heads // key.shape[1]
    out = torch.zeros(batch, count, heads, value.shape[-1], dtype=torch.float64)
    mask = mask.expand(batch, heads, count, key.shape[2])
    for b in range(batch):
        for h in range(heads):
            for t in range(count):
                scores = key[b, h // per_group].double() @ query[b, h, t].double() * scale
                own = mask[b, h, t]
                scores = scores.masked_fill(~own, -torch.inf) if own.dtype == torch.bool else scores + own.double()
                out[b, t, h] = scores.softmax(-1) @ value[b, h // per_group].double()
    return out


def attention_inputs(batch: int, heads: int, groups: int, count: int, length: int, size: int, value_size: int) -> Any:
    generator = torch.Generator().manual_seed(batch + heads + count)
    query = torch.randn(batch, count, heads, size, generator=generator).transpose(1, 2)  # laid out as models do
    key = torch.randn(batch, groups, length + 3, size, generator=generator)[:, :, :length]  # a view of a cache
    value = torch.randn(batch, groups, length + 3, value_size, generator=generator)[:, :, :length]
    return query, key, value, generator


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "groups", "count", "size", "value_size"),
    [(1, 6, 2, 1, 8, 8), (2, 6, 2, 5, 8, 8), (3, 4, 1, 2, 16, 16), (2, 4, 4, 3, 8, 8), (2, 6, 3, 4, 12, 6)],
)
def test_grouped_attention_is_attention(
    batch: int, heads: int, groups: int, count: int, size: int, value_size: int, additive: bool
) -> None:
    length = 11
    query, key, value, generator = attention_inputs(batch, heads, groups, count, length, size, value_size)
    seen = torch.rand(batch, 1, count, length, generator=generator) < 0.5
    seen[..., 0] = True
    mask = torch.randn(seen.shape, generator=generator).masked_fill(~seen, torch.finfo(torch.float32).min)
    mask = mask if additive else seen
    module: Any = SimpleNamespace(num_key_value_groups=heads // groups, is_causal=True)
    for shape in {(batch, count), (1, count), (batch, 1), (1, 1)}:
        part = mask[: shape[0], :, : shape[1]]
        got, weights = grouped_attention(module, query, key, value, part, scaling=0.3, is_causal=True)
        assert weights is None
        assert got.shape == (batch, count, heads, value_size)
        assert got.is_contiguous()
        torch.testing.assert_close(got.double(), by_hand(query, key, value, part, 0.3), rtol=1e-5, atol=1e-5)


UNUSUAL: dict[str, dict[str, Any]] = {
    "per-head-mask": {"attention_mask": torch.rand(2, 6, 5, 11) < 0.8},
    "no-mask": {"attention_mask": None},
    "no-mask-not-causal": {"attention_mask": None, "is_causal": False},
    "position-bias": {"position_bias": torch.linspace(-2, 2, 6 * 5 * 11).view(1, 6, 5, 11)},
    "sinks": {"s_aux": torch.ones(6)},
    "unknown": {"something_new": 1.0},
    "soft-cap": {"softcap": 30.0},
    "output-attentions": {"output_attentions": True},
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_what_is_unusual_goes_to_transformers_unchanged(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value, _ = attention_inputs(2, 6, 2, 5, 11, 8, 8)
    module: Any = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    usual = {"attention_mask": torch.ones(2, 1, 5, 11, dtype=torch.bool).tril(6), "dropout": 0.0, "scaling": 0.4}
    arguments = {**usual, **UNUSUAL[case]}
    want, given = torch.zeros(2), []

    def spy(*args: Any, **kwargs: Any) -> Any:
        given.append((args, kwargs))
        return want, None

    monkeypatch.setattr(tuning, "sdpa_attention_forward", spy)
    assert grouped_attention(module, query, key, value, **arguments)[0] is want
    ((args, kwargs),) = given
    assert all(a is b for a, b in zip(args, (module, query, key, value, arguments.pop("attention_mask")), strict=True))
    assert kwargs == arguments


def test_dropout_is_left_to_transformers() -> None:
    query, key, value, _ = attention_inputs(1, 6, 2, 5, 11, 8, 8)
    module: Any = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    mask = torch.ones(1, 1, 5, 11, dtype=torch.bool)
    torch.manual_seed(0)
    want = tuning.sdpa_attention_forward(module, query, key, value, mask, dropout=0.5)[0]
    torch.manual_seed(0)
    assert torch.equal(grouped_attention(module, query, key, value, mask, dropout=0.5)[0], want)


def test_a_model_with_groups_uses_them_and_others_say_why_not() -> None:
    for case in zoo.CASES:
        model = case.build()
        text = model.config.get_text_config(decoder=True)
        others = [c for k in model.config.sub_configs if (c := getattr(model.config, k)) is not text]
        kept = [config._attn_implementation for config in others]
        before = text._attn_implementation
        done = tune(model, smallest=0)
        assert done.attention == (case.name in SDPA_WITH_GROUPS), (case.name, done)
        assert text._attn_implementation == (ATTENTION if done.attention else before), case.name
        assert done.attention or any("query heads are not grouped" in reason for reason in done.reasons)
        assert [config._attn_implementation for config in others] == kept, case.name
        assert tune(model, smallest=0) == done


def test_code_that_asks_for_sdpa_by_name_keeps_it() -> None:
    config = tf.FalconConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, eos_token_id=None
    )
    model = tf.FalconForCausalLM(config)
    assert "modeling_falcon asks for sdpa by its name" in (tuning._bound_to_sdpa(model.get_decoder()) or "")
    for module in model.modules():
        module.num_key_value_groups = 4  # even if it said that it had groups
    assert not tune(model).attention
    assert model.config._attn_implementation == "sdpa"


# Whole models


def tree_mask(count: int) -> torch.Tensor:
    """Bool [2, 1, count, count]: a line before a tree, and a line."""
    seen = torch.ones(count, count, dtype=torch.bool).tril()
    tree = seen.clone()
    first = count - len(PARENTS)
    for node in range(len(PARENTS)):
        tree[first + node, first:] = False
        at = node
        while at >= 0:
            tree[first + node, first + at] = True
            at = PARENTS[at]
    return torch.stack([tree, seen])[:, None]


def logits(model: Any, masked: bool) -> torch.Tensor:
    """Of two sequences: through a mask given, a dict of them where layers differ, or left to the model."""
    count = 24
    ids = torch.randint(0, zoo.WORDS, (2, count), generator=torch.Generator().manual_seed(3))
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if masked:
        text = model.config.get_text_config(decoder=True)
        mask = tree_mask(count)
        distance = torch.arange(count)[:, None] - torch.arange(count)
        masks = {"full_attention": mask, "sliding_attention": mask & (distance < zoo.WINDOW)}
        masks["chunked_attention"] = masks["sliding_attention"]
        if text._attn_implementation == "eager":
            lowest = torch.finfo(model.dtype).min
            masks = {k: torch.zeros(m.shape, dtype=model.dtype).masked_fill(~m, lowest) for k, m in masks.items()}
        kinds = set(getattr(text, "layer_types", None) or ())
        inputs["attention_mask"] = {k: masks[k] for k in kinds} if len(kinds) > 1 else masks["full_attention"]
        inputs["position_ids"] = torch.arange(count).expand(2, -1)
    if type(model).__name__ == "Llama4ForConditionalGeneration":
        return model.language_model(**inputs).logits
    return model(**inputs).logits


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_tuned_model_computes_the_same(name: str, masked: bool) -> None:
    supported(torch.float32)
    plain, tuned = zoo.case(name).model, zoo.case(name).build()
    done = tune(tuned, smallest=0)
    assert done.packed > 0
    want, got = logits(plain, masked), logits(tuned, masked)
    assert float(want.std()) > 0.1
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    if masked:  # the mask does matter
        assert float((want - logits(plain, False)).abs().max()) > 0.1


@pytest.mark.parametrize("name", ["llama", "llama-tied-eager", "qwen2.5-vl", "gemma3", "deepseek-v3", "gpt2"])
def test_in_bfloat16_a_tuned_model_is_as_close_to_the_truth(name: str) -> None:
    supported(torch.bfloat16)
    plain = zoo.case(name).build().to(torch.bfloat16)
    truth = copy.deepcopy(plain).float()
    tuned = copy.deepcopy(plain)
    assert tune(tuned, smallest=0).packed > 0

    def error(model: Any) -> float:
        off = (logits(model, True).double() - exact).square().mean(-1).sqrt()  # per token: an expert may change
        return float(off.median() / exact.std())

    exact = logits(truth, True)
    assert error(tuned) < max(1.5 * error(plain), 0.01)
    assert error(plain) > 1e-4


def test_gpt2_has_nothing_but_its_head_to_pack() -> None:
    supported(torch.float32)
    model = zoo.case("gpt2").build()
    assert tune(model, smallest=0).packed == 1
    assert isinstance(model.lm_head, PackedLinear)


def test_a_tied_embedding_still_embeds_and_a_new_head_is_used() -> None:
    supported(torch.float32)
    plain, model = zoo.case("llama-tied-eager").model, zoo.case("llama-tied-eager").build()
    tune(model, smallest=0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert current(model.lm_head)
    torch.testing.assert_close(logits(model, True), logits(plain, True), rtol=1e-4, atol=1e-4)
    head = model.lm_head.weight.flip(0).clone()
    model.lm_head.weight = nn.Parameter(head, requires_grad=False)
    torch.testing.assert_close(logits(model, True), logits(plain, True).flip(-1), rtol=1e-4, atol=1e-4)
    assert tune(model, smallest=0).packed == 29  # the new head too
    assert current(model.lm_head)
    torch.testing.assert_close(logits(model, True), logits(plain, True).flip(-1), rtol=1e-4, atol=1e-4)


def test_a_reference_copied_from_a_tuned_model_is_in_full_precision() -> None:
    supported(torch.bfloat16)
    plain = zoo.case("qwen3").build().to(torch.bfloat16)
    want = logits(copy.deepcopy(plain).float(), True)
    tune(plain, smallest=0)
    torch.testing.assert_close(logits(copy.deepcopy(plain).float(), True), want, rtol=1e-4, atol=1e-4)


def test_an_untuned_model_of_the_same_class_is_not_touched() -> None:
    other = zoo.case("llama").build()
    tune(zoo.case("llama").build(), smallest=0)
    assert other.config._attn_implementation == "sdpa"
    assert not any(isinstance(module, PackedLinear) for module in other.modules())


class Strict(nn.Module):
    """Runs on tokens, and does with a layer's result what is possible with a whole one only, or more than once."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.calls = how, 0
        self.embed, self.q, self.k = nn.Embedding(8, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(_attn_implementation="eager"))
        self.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        x, self.calls = self.embed(input_ids), self.calls + 1
        if self.how == "more than tokens":
            raise TypeError("where are the pixels?")
        q, k = self.q(x), self.k(x)
        if self.how == "flat":
            q = q.view(-1)
        elif self.how == "another result" and self.calls > 1:
            k = k + 100
        return SimpleNamespace(logits=q.reshape(x.shape) + k)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("flat", "fails with parts of one product: view size"),
        ("another result", "computes something else"),
        ("more than tokens", "does not run on tokens alone: where are the pixels?"),
    ],
)
def test_a_model_that_cannot_do_with_parts_has_its_layers_one_by_one_and_says_so(how: str, reason: str) -> None:
    supported(torch.float32)
    model = Strict(how)
    done = tune(model, smallest=0)
    assert done.packed == 2
    assert reason in done.reasons[0] and "one by one" in done.reasons[0]
    assert len(model.q.siblings.layers) == len(model.k.siblings.layers) == 1
    x = torch.randn(2, 3, 32)
    torch.testing.assert_close(model.q(x), F.linear(x, model.q.weight, model.q.bias), rtol=1e-5, atol=1e-5)


# Compiled

SCRIPT = Path(__file__).with_name("compiled_tuning.py")


@pytest.mark.thorough
def test_a_compiled_model_multiplies_by_the_packed_weights_also_from_the_cache(tmp_path: Path) -> None:
    supported(torch.float32)
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    runs = []
    for _ in range(2):
        run = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        runs.append(json.loads(run.stdout.splitlines()[-1]))
    first, second = runs
    assert second["seen"] == first["seen"]
    assert (first["miss"] > 0, second["miss"], second["hit"] > 0) == (True, 0, True)
    for dtype, seen in first["seen"].items():
        assert seen["linears"] == 8
        # queries, keys and values; their output; gate and up; down; the head, which had been written to the second time
        assert seen["found"] == [5, 0, 4, 1]
        assert max(seen["off"]) < (1e-5 if dtype == "torch.float32" else 0.05)
