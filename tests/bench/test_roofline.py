"""Times by hand, and what must hold for any model and machine."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.bench.hardware import AllReduce, Hardware
from eyas.bench.quantization import PLAIN, Format
from eyas.bench.roofline import Forecast, Split, forward
from eyas.bench.shapes import Attention, Experts, Model, Weights, default_drafter, target_model
from eyas.bridges.target import Target
from eyas.core import DraftShape

# 1 GB/s and 1 GFLOP/s, so that bytes and operations are nanoseconds
SLOW = Hardware(
    "slow",
    memory_gb=1,
    memory_gb_s=1,
    tflops={"bf16": 1e-3, "fp8": 2e-3},
    memory_efficiency=1,
    compute_efficiency=1,
    kernel_us=1e-3,
    all_reduce={"ring": AllReduce("ring", 0.1, 0.01, 1)},
)
DENSE = Model(
    name="dense",
    layers=2,
    hidden=10,
    weights=(Weights("mlp", 400, 2), Weights("latent", 40, 2, split=False)),
    attention=Attention("GQA", 4, 2, 6, 50, (None, 8)),
    head=Weights("head", 200, 1, Format(8, "fp8")),
    vocabulary=20,
    embedding=200,
    kernels=7,
)
SPARSE = replace(DENSE, experts=Experts(4, 2, 100, 2, Format(4)))
CHAIN = DraftShape(3, 1, 4)


def nanoseconds(split):
    return {name: pytest.approx(1e9 * getattr(split, name)) for name in Split.names()}


def test_a_forward_by_hand():
    # one token: 1,600 + 160 + 200 bytes of weights; 2 x 800 + 2 x 80 operations fit behind their bytes, 400 at fp8 too
    # 3 sequences at context 20: 3 x (20 + 8) rows of 2 heads x 6 numbers x 2 bytes; 50 operations a row
    found = forward(DENSE, SLOW, 1, sequences=3, tokens=1, context=20)
    kv, attention = 3 * 28 * 24, 3 * 28 * 50
    computing = (3 * 2 * 800 - 1600) + (3 * 2 * 80 - 160) + (3 * 2 * 200 / 2 - 200) + (attention - kv)
    assert {"weights": 1960, "experts": 0, "kv": kv, "compute": computing, "all_reduce": 0, "launch": 7} == nanoseconds(
        found
    )
    assert found.total == pytest.approx(1e-9 * (1960 + kv + computing + 7))


def test_experts_by_hand():
    # 2 tokens: 4 (1 - (1/2)^2) = 3 of 4 experts, 50 bytes each, in 2 layers; 2 x 2 x 2 x 100 x 2 operations
    one, both = (forward(model, SLOW, 1, sequences=2, tokens=1, context=1) for model in (DENSE, SPARSE))
    assert both.experts == pytest.approx(300e-9)
    assert both.compute - one.compute == pytest.approx((1600 - 300) * 1e-9)


def test_parallel_by_hand():
    found = forward(SPARSE, SLOW, 4, sequences=1, tokens=1, context=20)
    assert found.weights == pytest.approx((1600 / 4 + 160 + 200 / 4) * 1e-9)
    assert found.experts == pytest.approx(2 * 50 * 2 / 4 * 1e-9)
    assert found.kv == pytest.approx(28 * 12 * 1e-9)  # two heads on four GPUs: one each, copied
    reduced = 5 * (100 + 6 * 10 + 1.5 * 20)  # 2 layers x 2 and the embedding, of 10 numbers
    gathered = 100 + 3 * 10 + 0.75 * 40  # 20 logits
    assert found.all_reduce == pytest.approx((reduced + gathered) * 1e-9)


def test_logits_and_fusion():
    drafter = replace(DENSE, fusion=Weights("fusion", 300))
    bare, fused = (forward(drafter, SLOW, 1, sequences=1, tokens=1, context=0, fuse=fuse) for fuse in (False, True))
    assert fused.weights - bare.weights == pytest.approx(600e-9)
    all_logits, one = (forward(DENSE, SLOW, 1, sequences=1, tokens=9, context=0, logits=n) for n in (None, 1))
    assert all_logits.compute - one.compute == pytest.approx((9 * 2 * 200 / 2 - 200) * 1e-9)


def test_a_step_is_its_parts():
    cost = Forecast(DENSE, replace(DENSE, fusion=Weights("fusion", 300)), replace(SLOW, step_us=0.5))
    verify, draft = cost.verify(2, 4, 16), cost.draft(CHAIN, 2, 16)
    assert verify.launch == pytest.approx(507e-9) and draft.launch == pytest.approx(3 * 7e-9)
    assert cost.step(CHAIN, 2, 16) == pytest.approx(verify.total + draft.total)
    assert cost.step(None, 2, 16) == cost.seconds("forward", 2, 1, 16) == cost.verify(2, 1, 16).total
    assert cost.seconds("propose", 2, 3, 16) == pytest.approx(3 * cost.seconds("propose", 2, 1, 16))
    assert cost.seconds("rest", 2, 1, 0) is None
    wide, narrow = cost.draft(DraftShape(3, 2, 8), 2, 16), cost.draft(CHAIN, 2, 16)
    assert wide.kv == pytest.approx(narrow.kv / 3 * 5)  # two further passes of two branches each


CONFIG = {
    **{"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16},
    **{"num_key_value_heads": 4, "vocab_size": 8000},
}
MOE = CONFIG | {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256}


def costs(config, **machine):
    target = Target(Path("x"), config)
    model = target_model(target)
    return Forecast(
        model, default_drafter(target, model), replace(SLOW, memory_gb_s=900, tflops={"bf16": 90}, **machine)
    )


@settings(max_examples=60, deadline=None)
@given(
    config=st.sampled_from([CONFIG, MOE]),
    B=st.integers(1, 200),
    T=st.integers(1, 16),
    S=st.integers(0, 20_000),
    gpus=st.sampled_from([1, 2, 4, 8]),
)
def test_more_work_never_takes_less_time(config, B, T, S, gpus):
    cost = replace(costs(config), gpus=gpus)
    here = cost.verify(B, T, S)
    for more in (cost.verify(B + 1, T, S), cost.verify(B, T + 1, S), cost.verify(B, T, S + 500)):
        assert more.total >= here.total * (1 - 1e-12)
        assert all(getattr(more, name) >= 0 for name in Split.names())
    # a token is never dearer in a larger batch, and a draft never cheaper for being longer
    assert cost.verify(2 * B, T, S).total <= 2 * here.total * (1 + 1e-12)
    assert cost.draft(DraftShape(4, 1, 5), B, S).total > cost.draft(CHAIN, B, S).total
    assert cost.draft(DraftShape(3, 4, 8), B, S).total >= cost.draft(CHAIN, B, S).total


@settings(max_examples=40, deadline=None)
@given(B=st.integers(1, 64), S=st.integers(1, 4000))
def test_a_better_machine_is_never_slower(B, S):
    here = costs(MOE).verify(B, 4, S).total
    assert costs(MOE, memory_efficiency=0.5).verify(B, 4, S).total >= here
    assert costs(MOE, compute_efficiency=0.5).verify(B, 4, S).total >= here
    assert costs(MOE, kernel_us=5).verify(B, 4, S).total >= here
    alone, shared = (replace(costs(MOE, all_reduce={"r": AllReduce("ring", 0, 0, 1e9)}), gpus=g) for g in (1, 8))
    assert shared.verify(B, 4, S).total <= alone.verify(B, 4, S).total  # with all-reduce for nothing


def test_verifying_touches_more_experts_than_decoding():
    """Why mixtures of experts gain less: a dense target verifies four tokens for the price of one."""
    dense, sparse = (costs(config) for config in (CONFIG, MOE))
    grown = [cost.verify(1, 4, 0).total / cost.verify(1, 1, 0).total for cost in (dense, sparse)]
    assert grown[0] == pytest.approx(1, abs=0.01) and grown[1] > 1.2
    assert sparse.verify(1, 4, 0).experts / sparse.verify(1, 1, 0).experts == pytest.approx(8 * (1 - (7 / 8) ** 4))


def test_formats_without_a_peak_run_in_bf16():
    quantized = replace(DENSE, weights=(Weights("mlp", 400, 2, Format(8, "int8")),))
    plain = replace(DENSE, weights=(Weights("mlp", 400, 2, replace(PLAIN, bits=8)),))
    assert forward(quantized, SLOW, 1, sequences=9, tokens=1, context=0) == forward(
        plain, SLOW, 1, sequences=9, tokens=1, context=0
    )
