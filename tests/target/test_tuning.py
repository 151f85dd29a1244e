"""A tuned model against the same model untouched, and each way in which a packed weight can cease to be current."""

from __future__ import annotations

import copy
import importlib.util
import io
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
from eyas.target.tuning import ATTENTION, PACKED, PackedLinear, grouped_attention, pack_linears, packed_nbytes, tune

FLOATS = [torch.float32, torch.bfloat16]
SDPA_WITH_GROUPS = {"llama", "mistral", "qwen2", "qwen3", "gemma3", "qwen2.5-vl", "llama4", "gemma3-vl"}
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 5]


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def supported(dtype: torch.dtype) -> None:
    if not tuning._packs(dtype):
        pytest.skip(f"oneDNN does not pack {dtype} on this machine")


def layer(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(48, 80, bias=bias, dtype=dtype).requires_grad_(False)


def packed_layer(dtype: torch.dtype = torch.float32, bias: bool = True) -> PackedLinear:
    supported(dtype)
    made = layer(dtype, bias)
    pack_linears(nn.Sequential(made), smallest=0)
    assert isinstance(made, PackedLinear)
    return made


def current(made: nn.Linear) -> bool:
    return tuning._packed_copy(made.weight) is not None


def assert_linear(made: nn.Linear, rows: int = 5) -> None:
    """The layer computes its weight and bias as they are now, by float64."""
    weight = made.weight
    x = torch.randn(rows, weight.shape[1], dtype=weight.dtype, generator=torch.Generator().manual_seed(1))
    bias = None if made.bias is None else made.bias.double()
    want = F.linear(x.double(), weight.double(), bias)
    got = made(x)
    assert got.dtype == weight.dtype
    limit = 1e-5 if weight.dtype in (torch.float32, torch.float64) else 2e-2
    torch.testing.assert_close(got.double(), want, rtol=limit, atol=limit * float(want.abs().max()))


# Linear layers


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_computes_the_same_for_any_number_and_layout_of_rows(dtype: torch.dtype, bias: bool) -> None:
    made, plain = packed_layer(dtype, bias), layer(dtype, bias)
    assert current(made)
    for rows in (1, 2, 7, 33, 300):
        assert_linear(made, rows)
    wide = torch.randn(6, 4, 96, dtype=dtype)
    inputs = {
        "vector": wide[0, 0, :48],
        "no-rows": wide[:0, :, :48],
        "steps": wide[..., ::2],
        "transposed": wide[..., :48].transpose(0, 1),
        "columns": torch.randn(48, 5, dtype=dtype).t(),
        "expanded": wide[:1, 0, :48].expand(7, 48),
        "every-other": wide[::2, None, :, 48:],
    }
    for name, x in inputs.items():
        got = made(x)
        torch.testing.assert_close(got, plain(x), rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, msg=name)
        assert got.stride() == torch.ops.eyas.packed_linear(x.to("meta"), made.weight.to("meta"), None).stride(), name


def test_parameters_stay_what_and_where_they_are() -> None:
    supported(torch.float32)
    model = nn.Sequential(layer(), nn.ReLU())
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    values = {name: value.clone() for name, value in model.state_dict().items()}
    packed, nbytes, reason = pack_linears(model, smallest=0)
    assert (packed, nbytes, reason) == (1, 48 * 80 * 4, None)
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == before
    assert list(model.state_dict()) == list(values)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert isinstance(model[0], nn.Linear)
    assert repr(model[0]) == "PackedLinear(in_features=48, out_features=80, bias=True)"


WRITES = {
    "mul_": lambda made: made.weight.mul_(-3.0),
    "copy_": lambda made: made.weight.copy_(torch.ones(80, 48)),
    "indexed": lambda made: made.weight.__setitem__((slice(3), slice(5)), 7.0),
    "load_state_dict": lambda made: made.load_state_dict({"weight": torch.ones(80, 48), "bias": torch.ones(80)}),
    "data": lambda made: setattr(made.weight, "data", torch.full((80, 48), 0.5)),
    "parameter": lambda made: setattr(made, "weight", nn.Parameter(torch.full((80, 48), 0.5), requires_grad=False)),
    "other-shape": lambda made: setattr(made, "weight", nn.Parameter(torch.ones(80, 16), requires_grad=False)),
    "double": lambda made: made.double(),
    "bfloat16": lambda made: made.to(torch.bfloat16),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("inference", [False, True])
def test_a_packed_copy_of_former_values_is_not_used(write: str, inference: bool) -> None:
    made = packed_layer()
    if inference and write not in ("mul_", "copy_", "indexed", "load_state_dict"):
        pytest.skip("makes tensors that inference mode owns")
    with torch.inference_mode(inference):
        WRITES[write](made)
    assert not current(made)
    assert not hasattr(made.weight, PACKED)  # its memory is free again
    assert_linear(made)
    made.pack()
    assert current(made) == (write != "double" and tuning._packs(made.weight.dtype))
    assert_linear(made)


def test_a_square_weight_turned_round_in_place_is_noticed() -> None:
    supported(torch.float32)
    made = nn.Linear(64, 64).requires_grad_(False)
    pack_linears(nn.Sequential(made), smallest=0)
    made.weight.data = made.weight.data.t()  # same address, type and version
    assert_linear(made)
    assert not current(made)


def test_an_address_used_again_is_not_taken_for_the_former_weight() -> None:
    for seed in range(20):
        made = packed_layer()
        made.weight.data = torch.empty(0)  # nobody but the packed copy holds the values now
        made.weight.data = torch.randn(80, 48, generator=torch.Generator().manual_seed(seed))
        assert_linear(made)


def test_conversion_there_and_back_computes_what_the_weight_has_become() -> None:
    made = packed_layer()
    made.to(torch.bfloat16).to(torch.float32)  # rounded on the way
    assert_linear(made)


def test_moving_to_where_it_is_keeps_the_packed_copy() -> None:
    made = packed_layer()
    made.to(torch.float32).to("cpu")
    assert current(made)
    assert_linear(made)


def test_a_copy_has_no_packed_weight_and_does_not_disturb_the_original() -> None:
    made = packed_layer(torch.bfloat16)
    other = copy.deepcopy(made).float()
    assert not hasattr(other.weight, PACKED)
    assert_linear(other)  # to float32's precision
    other.weight.zero_()
    assert current(made)
    assert_linear(made)


def test_a_saved_layer_leaves_its_packed_weight_behind() -> None:
    made, file = packed_layer(), io.BytesIO()
    torch.save(nn.Sequential(made), file)
    assert len(file.getvalue()) < 1.5 * made.weight.nbytes
    file.seek(0)
    loaded = torch.load(file, weights_only=False)[0]
    assert not current(loaded)
    assert_linear(loaded)


def test_functional_calls_use_the_weight_they_are_given() -> None:
    made = packed_layer()
    weight = torch.full((80, 48), 0.25)
    got = torch.func.functional_call(made, {"weight": weight, "bias": torch.zeros(80)}, torch.ones(1, 48))
    assert torch.equal(got, torch.full((1, 80), 12.0))


def test_a_hook_and_a_second_dtype_of_input_meet_the_plain_layer() -> None:
    made, seen = packed_layer(), []
    made.register_forward_hook(lambda _module, _args, out: seen.append(out.shape))
    made(torch.ones(2, 48))
    assert seen == [(2, 80)]
    with pytest.raises(RuntimeError):
        made(torch.ones(2, 48, dtype=torch.bfloat16))


def test_gradients_go_through_the_plain_product() -> None:
    made, plain = packed_layer(), layer()
    grads = []
    for module in (made, plain):
        x = torch.linspace(-1, 1, 96).view(2, 48).requires_grad_()
        with torch.enable_grad():
            module(x).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def test_what_cannot_be_packed_is_left_alone() -> None:
    class Own(nn.Linear):
        pass

    with torch.inference_mode():
        inference = nn.Linear(48, 80)
    replaced = nn.Linear(48, 80)
    replaced.forward = lambda x: x  # as accelerate's hooks do
    mixed = nn.Linear(48, 80)
    mixed.bias = nn.Parameter(mixed.bias.double())
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(48, 80))
    other_type, elsewhere = nn.Linear(48, 80, dtype=torch.float64), nn.Linear(48, 80, device="meta")
    model = nn.ModuleList([Own(48, 80), inference, replaced, mixed, normed, other_type, elsewhere, nn.Linear(2, 2)])
    classes = [type(module) for module in model]
    packed, nbytes, reason = pack_linears(model, smallest=5)
    assert (packed, nbytes) == (0, 0)
    assert reason is not None and "no linear layer" in reason
    assert [type(module) for module in model] == classes


def test_a_layer_too_small_to_gain_stays_plain() -> None:
    supported(torch.float32)
    model = nn.Sequential(nn.Linear(256, 255), nn.Linear(255, 257), nn.Linear(256, 256))
    assert pack_linears(model)[0] == 1
    assert [type(module) for module in model] == [nn.Linear, nn.Linear, PackedLinear]


def test_shared_weights_are_packed_and_counted_once() -> None:
    supported(torch.float32)
    first, second = layer(), layer()
    second.weight = first.weight
    model = nn.Sequential(first, second)
    assert packed_nbytes(model, smallest=0) == 48 * 80 * 4
    assert pack_linears(model, smallest=0)[:2] == (2, 48 * 80 * 4)
    assert packed_nbytes(model, smallest=0) == 0
    assert_linear(first)
    assert_linear(second)


def test_nothing_is_packed_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    supported(torch.float32)
    needed, margin = 48 * 80 * 4, 1 << 30
    model = nn.Sequential(layer())
    monkeypatch.setattr(tuning, "available_memory", lambda: margin + needed - 1)
    packed, nbytes, reason = pack_linears(model, smallest=0, margin=margin)
    assert (packed, nbytes, type(model[0])) == (0, 0, nn.Linear)
    assert reason is not None and "would leave less than 1.0 GiB" in reason
    monkeypatch.setattr(tuning, "available_memory", lambda: margin + needed)
    assert pack_linears(model, smallest=0, margin=margin)[0] == 1
    monkeypatch.setattr(tuning, "available_memory", lambda: 0)  # what is packed already costs nothing more
    assert pack_linears(model, smallest=0, margin=margin) == (1, needed, None)


def test_available_memory_is_that_of_this_machine() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < tuning.available_memory() <= total


def test_the_operation_is_registered_once_however_often_the_module_is_imported() -> None:
    made = packed_layer()
    spec = importlib.util.spec_from_file_location("eyas_tuning_again", tuning.__file__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = again  # dataclasses look it up
    try:
        spec.loader.exec_module(again)
        assert_linear(made)
        other = nn.Sequential(layer())
        assert again.pack_linears(other, smallest=0)[0] == 1
        assert_linear(other[0])
    finally:
        del sys.modules[spec.name]
    del again, other
    x = torch.ones(1, 48)
    assert torch.equal(torch.ops.eyas.packed_linear(x, made.weight, made.bias), made(x))


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


# Compiled

SCRIPT = Path(__file__).with_name("compiled_tuning.py")


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
        linears = seen["linears"]
        assert linears == 8
        assert seen["found"] == [linears, 0, linears - 1, 1]  # the second time, the head had been written to
        assert max(seen["off"]) < (1e-5 if dtype == "torch.float32" else 0.05)
