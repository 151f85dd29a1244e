"""Packed linear layers against the same untouched, and each way in which a packed weight ceases to be current."""

from __future__ import annotations

import copy
import importlib.util
import io
import os
import sys
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

from eyas.target import packing
from eyas.target.packing import PACKED, PackedLinear, find_families, pack_linears, packed_nbytes

FLOATS = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


def supported(dtype: torch.dtype) -> None:
    if not packing._packs(dtype):
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
    return packing._packed_copy([made.weight], [made.bias]) is not None


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
        assert got.stride() == torch.ops.eyas.packed_linears(x.to("meta"), [made.weight.to("meta")], [None]).stride(), (
            name
        )


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
    assert current(made) == (write != "double" and packing._packs(made.weight.dtype))
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
    monkeypatch.setattr(packing, "available_memory", lambda: margin + needed - 1)
    packed, nbytes, reason = pack_linears(model, smallest=0, margin=margin)
    assert (packed, nbytes, type(model[0])) == (0, 0, nn.Linear)
    assert reason is not None and "would leave less than 1.0 GiB" in reason
    monkeypatch.setattr(packing, "available_memory", lambda: margin + needed)
    assert pack_linears(model, smallest=0, margin=margin)[0] == 1
    monkeypatch.setattr(packing, "available_memory", lambda: 0)  # what is packed already costs nothing more
    assert pack_linears(model, smallest=0, margin=margin) == (1, needed, None)


def test_available_memory_is_that_of_this_machine() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < packing.available_memory() <= total


def test_the_operation_is_registered_once_however_often_the_module_is_imported() -> None:
    made = packed_layer()
    spec = importlib.util.spec_from_file_location("eyas_packing_again", packing.__file__)
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
    assert torch.equal(torch.ops.eyas.packed_linears(x, [made.weight], [made.bias]), made(x))


# Layers that read the same


class Block(nn.Module):
    """Three layers of one input, two of another, one of a third; ``twist`` calls one of them elsewhere too."""

    def __init__(self, bias: bool = True, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(48, width, bias=bias, dtype=dtype) for width in (64, 16, 32))
        self.gate, self.up = (nn.Linear(64, 96, bias=bias, dtype=dtype) for _ in range(2))
        self.down = nn.Linear(96, 48, bias=bias, dtype=dtype)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        y = q + torch.cat((k, v, k), dim=-1)
        return self.down(F.silu(self.gate(y)) * self.up(y))


def names(model: nn.Module, families: Any) -> list[list[str]]:
    known = {module: name for name, module in model.named_modules()}
    return [[known[layer] for layer in family] for family in families]


def family_block(dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple[Block, Block]:
    """A packed block, and the same untouched."""
    supported(dtype)
    model, plain = Block(bias, dtype), Block(bias, dtype)
    x = torch.ones(1, 48, dtype=dtype)
    families = find_families(model, lambda: model(x), smallest=0)
    assert names(model, families) == [["q", "k", "v"], ["gate", "up"]]
    assert pack_linears(model, smallest=0, families=families)[0] == 6
    return model, plain


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bias", [True, False])
def test_siblings_are_one_product_of_the_same_results(
    dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = family_block(dtype, bias)
    products: list[int] = []
    product = packing._packed_linears
    monkeypatch.setattr(packing, "_packed_linears", lambda x, w, b: products.append(len(w)) or product(x, w, b))
    for shape in ((1,), (1, 1), (2, 3), (40,), (0, 4)):
        x = torch.randn(*shape, 48, dtype=dtype)
        products.clear()
        torch.testing.assert_close(model(x), plain(x), rtol=3e-2, atol=1e-5 if dtype == torch.float32 else 3e-2)
        assert products == [3, 2, 1]
    assert model.q.siblings._held is None  # nothing is kept alive


def test_a_sibling_called_by_itself_or_on_something_else_is_right_too() -> None:
    model, plain = family_block()
    x, y = torch.randn(2, 48), torch.randn(2, 48)
    for made, want in ((model.k, plain.k), (model.q, plain.q), (model.v, plain.v)):
        for value in (x, y, x, x.clone()):
            torch.testing.assert_close(made(value), want(value), rtol=1e-5, atol=1e-5)


def test_an_input_written_to_between_two_siblings_is_read_anew() -> None:
    model, plain = family_block()
    x = torch.randn(2, 48)
    model.q(x)
    x.mul_(-2.0)
    torch.testing.assert_close(model.k(x), plain.k(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("what", ["weight", "bias"])
def test_a_write_to_one_sibling_is_noticed_by_all(which: str, what: str) -> None:
    model, plain = family_block()
    for block in (model, plain):
        getattr(getattr(block, which), what).mul_(-2.0)
    x = torch.randn(3, 48)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)
    model.q.pack()
    assert packing._packed_copy(*model.q.siblings.parameters()) is not None
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)


def test_a_new_parameter_of_one_sibling_is_used() -> None:
    model, plain = family_block()
    for block in (model, plain):
        block.v.weight = nn.Parameter(torch.full((32, 48), 0.25), requires_grad=False)
    x = torch.randn(3, 48)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)


def test_siblings_copied_are_siblings_of_the_copies() -> None:
    model, plain = family_block()
    other = copy.deepcopy(model)
    assert all(layer in other.modules() for layer in other.q.siblings.layers)
    other.q.weight.zero_()
    x = torch.randn(3, 48)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)
    plain.q.weight.zero_()
    torch.testing.assert_close(other(x), plain(x), rtol=1e-5, atol=1e-5)


def test_threads_on_one_model_get_their_own_results() -> None:
    model, plain = family_block()
    inputs = [torch.randn(2, 48) for _ in range(4)]
    wants, wrong = [plain(x) for x in inputs], []

    def work(x: torch.Tensor, want: torch.Tensor) -> None:
        with torch.no_grad():
            for _ in range(300):
                if not torch.allclose(model(x), want, rtol=1e-5, atol=1e-5):
                    wrong.append(x)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, wants, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_layers_of_different_parents_types_or_turns_are_no_family() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.own, self.plain = Block(), nn.Linear(48, 64), nn.Linear(48, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # own and plain: one parent, but only one has a bias; inner.q: another parent; own again: twice
            return self.plain(x) + self.own(x) + self.inner.q(x) + self.own(x.clone())

    model = Outer().requires_grad_(False)
    assert find_families(model, lambda: model(torch.ones(1, 48)), smallest=0) == []


def test_the_product_of_siblings_has_the_layout_it_says() -> None:
    model, _ = family_block()
    weights, biases = model.q.siblings.parameters()
    for x in (torch.ones(48), torch.ones(1, 2, 48), torch.ones(8, 48), torch.ones(2, 0, 48)):
        got = torch.ops.eyas.packed_linears(x, weights, biases)
        meta = torch.ops.eyas.packed_linears(
            x.to("meta"), [w.to("meta") for w in weights], [b.to("meta") for b in biases]
        )
        assert (got.shape, got.stride()) == (meta.shape, meta.stride())


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "deepseek-v3"])
def test_real_models_have_families(name: str) -> None:
    supported(torch.float32)
    model = zoo.case(name).build()
    found = names(model, find_families(model, lambda: model(input_ids=torch.arange(3)[None]), smallest=0))
    assert found
    kinds = {tuple(part.rsplit(".", 1)[-1] for part in family) for family in found}
    if name != "deepseek-v3":
        assert kinds == {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")}
