"""Plans: what follows from step times and acceptance, and that the guide shows what the model says today."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from eyas.bench.hardware import PROFILES, AllReduce
from eyas.bench.plan import Question, needed_length, plan, rates_by_position, rates_of_length
from eyas.bench.roofline import Forecast
from eyas.core import DraftShape, UsageError
from eyas.speculation.cost import AcceptanceRates, best, expected_tokens, grid

ROOT = Path(__file__).parents[2]
CHAIN = DraftShape(3, 1, 4)
H100 = PROFILES["h100-sxm"]
CONFIG = {
    **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}


@pytest.fixture
def target(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_what_follows_from_step_times(target):
    rates = rates_by_position([0.8, 0.7, 0.6], 1)
    found = plan(Question(target, H100, (CHAIN,), rates=rates, concurrency=(8, 1)))
    assert [point.concurrency for point in found.points] == [1, 8]
    for point in found.points:
        step = point.verify.total + point.draft.total
        assert point.tokens == pytest.approx(1 + 0.8 + 0.56 + 0.336)
        assert point.break_even == pytest.approx(step / point.plain.total)
        assert point.plain_speed == pytest.approx(point.concurrency / point.plain.total)
        assert point.speed == pytest.approx(point.concurrency * point.tokens / step)
        assert point.speedup == pytest.approx(point.speed / point.plain_speed) and point.pays
    assert found.break_even_concurrency is None


def test_the_predictor_is_the_engines(target):
    """The best shape and its speed are what ``speculation.cost.best`` says."""
    shapes, rates = tuple(grid()), rates_by_position([0.8, 0.7, 0.6], 8)
    found = plan(Question(target, H100, shapes, rates=rates, concurrency=(1, 64)))
    forecast = Forecast(found.target, found.drafter, H100)
    for point in found.points:
        first = best(shapes, forecast, rates, sequences=point.concurrency, length=1024)[0]
        assert (first.shape, first.tokens) == (point.shape, point.tokens)
        assert first.speed == pytest.approx(point.speed)
    assert found.points[0].shape.num_draft_tokens >= found.points[1].shape.num_draft_tokens


def test_without_acceptance_only_break_even_is_known(target):
    (point,) = plan(Question(target, H100, tuple(grid()), concurrency=(1,))).points
    assert point.shape == CHAIN and 1 < point.break_even < 1.5
    assert (point.tokens, point.speed, point.speedup, point.pays) == (None,) * 4


def test_a_drafter_that_is_never_right_does_not_pay(target):
    found = plan(Question(target, H100, (CHAIN,), rates=rates_by_position([0.0], 1), concurrency=(1, 32)))
    assert [point.pays for point in found.points] == [False, False] and found.break_even_concurrency == 1
    assert all(point.speedup == pytest.approx(1 / point.break_even) for point in found.points)


def test_break_even_is_where_nothing_is_gained(target):
    (point,) = plan(Question(target, H100, (CHAIN,), concurrency=(4,))).points
    rates = AcceptanceRates.from_length(point.break_even, CHAIN)
    (even,) = plan(Question(target, H100, (CHAIN,), rates=rates, concurrency=(4,))).points
    assert even.speedup == pytest.approx(1)


def test_a_machine_short_of_arithmetic_stops_paying(target):
    weak = replace(H100, tflops={"bf16": 40})
    found = plan(Question(target, weak, (CHAIN,), rates=rates_by_position([0.7, 0.6, 0.5], 1)))
    speedups = [point.speedup for point in found.points]
    assert speedups == sorted(speedups, reverse=True) and speedups[0] > 1.5 > 0.7 > speedups[-1]
    limit = found.break_even_concurrency
    assert all(point.pays == (point.concurrency < limit) for point in found.points)


def test_lengths_that_would_explain_a_speedup(target):
    found = plan(Question(target, H100, (CHAIN,), concurrency=(2,)))
    forecast = Forecast(found.target, found.drafter, H100)
    assert needed_length(forecast, CHAIN, 1, 2, 1024) == pytest.approx(found.points[0].break_even)
    assert needed_length(forecast, CHAIN, 1.81, 2, 1024) == pytest.approx(1.81 * found.points[0].break_even)


@pytest.mark.parametrize("shape", [CHAIN, DraftShape(5, 1, 6), DraftShape(3, 4, 8), DraftShape(2, 2, 4)])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_rates_of_a_length_come_to_it(shape, share):
    length = 1 + share * shape.num_steps
    rates = rates_of_length(length, [shape])
    assert expected_tokens(shape, rates) == pytest.approx(length, abs=1e-6)
    assert len(rates.by_rank) == 1  # the same at all depths


def test_rates_of_a_length_by_hand():
    assert rates_of_length(1.75, [DraftShape(2, 1, 3)]).by_rank[0][0] == pytest.approx(0.5)  # 1 + 1/2 + 1/4


def test_acceptance_that_is_none(target):
    with pytest.raises(UsageError, match=r"between 1 and 4 tokens, not 4\.5"):
        rates_of_length(4.5, [CHAIN])
    with pytest.raises(UsageError, match="belongs to one draft shape"):
        rates_of_length(2.5, grid())
    for rates in ([1.2], [-0.1], [float("nan")], []):
        with pytest.raises(UsageError, match="--acceptance takes rates between 0 and 1"):
            rates_by_position(rates, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpus": 0}, "gpus must be at least 1"),
        ({"context": 0}, "context must be at least 1"),
        ({"concurrency": (4, 0)}, "concurrency must be at least 1, got 0"),
    ],
)
def test_questions_that_are_none(change, words):
    with pytest.raises(UsageError, match=words):
        Question(**{"target": "x", "hardware": H100, "shapes": (CHAIN,), **change})


def test_several_gpus(target):
    question = Question(target, H100, (CHAIN,), gpus=3)
    with pytest.raises(UsageError, match="do not divide among 3 GPUs"):
        plan(question)
    with pytest.raises(UsageError, match="it is one GPU only"):
        plan(replace(question, gpus=2, hardware=replace(H100, all_reduce={})))
    dear = replace(H100, all_reduce={"ring": AllReduce("ring", 60, 0, 100)})
    one, many = (plan(replace(question, gpus=8, hardware=machine)).points[0] for machine in (H100, dear))
    assert many.plain.all_reduce / many.plain.total > 0.5 > one.plain.all_reduce / one.plain.total
    assert many.break_even > 1  # every pass of the drafter pays for it too
    assert many.draft.all_reduce == pytest.approx(3 * 4 * 60e-6, rel=0.01)


def test_the_cache_in_8_bits_is_the_drafters_too(target):
    full, half = (plan(Question(target, H100, (CHAIN,), kv_cache_dtype=kind)).points[-1] for kind in ("auto", "fp8"))
    assert half.plain.kv == pytest.approx(full.plain.kv / 2) and half.draft.kv == pytest.approx(full.draft.kv / 2)


def test_notes(target):
    rates = rates_by_position([0.8], 8)
    notes = " ".join(plan(Question(target, PROFILES["rtx-4090"], tuple(grid()), rates=rates, context=4096)).notes())
    # 16.1 GB of weights, 0.8 of the drafter's, 16 x 4,096 x 128 KiB of cache
    assert "At concurrency 16 weights and cache take 25 GB, and there are 24 GB" in notes
    assert "Deeper positions" in notes and "further candidates" in notes
    assert len(plan(Question(target, H100, (CHAIN,), concurrency=(1,))).notes()) == 1


def test_planning_needs_no_torch():
    code = "import sys, eyas.bench.plan, eyas.cli.plan; print('torch' in sys.modules, 'transformers' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "False"]


def test_the_guide_shows_what_is_predicted_today():
    spec = spec_from_file_location("plan_vs_published", ROOT / "benchmarks/plan_vs_published.py")
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    guide = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
    shown = guide.split(script.BEGIN)[1].split(script.END)[0].strip()
    assert shown == "\n\n".join(script.tables()), "run benchmarks/plan_vs_published.py --update docs/plan.md"
