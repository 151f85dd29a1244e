from __future__ import annotations

from dataclasses import replace

import pytest
from bench import made

from eyas.bench.facts import Facts
from eyas.bench.passes import Level
from eyas.bench.results import found_at
from eyas.bench.statistics import Interval
from eyas.bench.verdict import Found, differences_of, judge, refusals
from eyas.bridges.metrics import Speculation
from eyas.core import DraftShape

AT = [Level("concurrency", n) for n in (1, 8, 64)]
PLAIN = Facts(
    "http://a",
    engine="SGLang",
    version="0.5.9",
    model="/models/Llama-8B",
    context_length=8192,
    max_running_requests=64,
    speculates=False,
    settings={"quantization": "fp8", "tp_size": 8},
)
FAST = replace(PLAIN, where="http://b", speculates=True, shape=DraftShape())


def found(level: Level, low: float, high: float, rounds: int = 10, failed: float = 0.0) -> Found:
    interval = Interval((low * high) ** 0.5, low, high)
    return Found(level, interval, interval, rounds, failed)


@pytest.mark.parametrize(
    ("intervals", "outcome", "code"),
    [
        ([(1.5, 1.6), (1.2, 1.3), (1.01, 1.05)], "pays", 0),
        ([(1.5, 1.6), (1.2, 1.3), (0.98, 1.05)], "not shown", 3),
        ([(1.5, 1.6), (0.98, 1.3), (0.8, 0.9)], "does not pay", 4),
        ([(0.7, 0.8), (0.6, 0.7), (0.5, 0.6)], "does not pay", 4),
    ],
)
def test_exit_codes(intervals, outcome, code):
    verdict = judge([found(level, *interval) for level, interval in zip(AT, intervals, strict=True)])
    assert (verdict.outcome, verdict.exit_code) == (outcome, code)


def test_sentences():
    every = judge([found(level, 1.4, 1.6) for level in AT]).sentence
    assert every.startswith("Speculation pays at every concurrency measured: 1.50x [1.40, 1.60] at 1,")
    mixed = judge([found(AT[0], 1.5, 1.7), found(AT[1], 0.95, 1.1), found(AT[2], 0.7, 0.8)])
    for words in (
        "pays at concurrency 1 (",
        "does not pay at concurrency 64 (",
        "is not shown to do either at concurrency 8",
    ):
        assert words in mixed.sentence
    assert 8 < mixed.break_even < 64
    assert "pays at concurrency 8: 1.50x" in judge([found(AT[1], 1.4, 1.6)]).sentence
    assert "(by 1.2x or more)" in judge([found(AT[1], 1.4, 1.6)], even=1.2).sentence


def test_few_rounds_and_failed_requests_show_nothing():
    few = judge([found(AT[0], 1.5, 1.6, rounds=5)])
    assert few.outcome == "not shown" and "5 rounds are too few, 6 are the least" in few.sentence
    assert judge([found(AT[0], 1.5, 1.6, failed=0.01)]).outcome == "pays"
    failing = judge([found(AT[0], 1.5, 1.6, failed=0.25)])
    assert failing.outcome == "not shown" and "25% of the requests failed" in failing.sentence


def test_a_gate_may_ask_for_more_than_no_loss():
    one = [found(AT[0], 1.1, 1.15)]
    assert [judge(one, even).exit_code for even in (1.0, 1.12, 1.2)] == [0, 3, 4]


def test_sides_that_differ_in_speculation_only_are_judged():
    assert refusals(PLAIN, FAST, AT) == []


@pytest.mark.parametrize(
    ("without", "with_", "words"),
    [
        (
            {},
            {"simulated": "SGLANG_SIMULATE_ACC_LEN=3"},
            "acceptance of http://b is simulated: SGLANG_SIMULATE_ACC_LEN=3",
        ),
        ({"speculates": True}, {}, "speculates itself: launch it without a drafter, or swap"),
        ({}, {"model": "/models/Llama-70B"}, "different models: /models/Llama-8B without, /models/Llama-70B with"),
        ({"settings": {"quantization": "fp8", "tp_size": 4}}, {}, "tp_size is 4 without, 8 with"),
        ({"settings": {"quantization": "awq"}}, {}, "quantization is awq without, fp8 with"),
        ({"engine": "vLLM"}, {}, "different engines: vLLM without, SGLang with"),
        ({}, {"context_length": 4096}, "context of 8,192 tokens without, 4,096 with"),
        ({"max_running_requests": 2048}, {"max_running_requests": 48}, "2,048 running requests without, 48 with"),
        ({"sampling": {"sampling_defaults": "openai"}}, {}, "sample differently by default: sampling_defaults"),
    ],
)
def test_what_cannot_be_judged(without, with_, words):
    (only,) = refusals(replace(PLAIN, **without), replace(FAST, **with_), AT)
    assert words in only


def test_a_quantisation_that_only_one_side_was_given():
    """vLLM tells what it runs with, so that none is another; SGLang what it was told, so that it may have read it."""
    unsaid = {"quantization": None, "tp_size": 8}
    sides = replace(PLAIN, settings=unsaid), FAST
    assert refusals(*sides, AT) == []
    (note,) = differences_of(dict(zip(("without", "with"), sides, strict=True)))
    assert note.endswith("quantization None without, 'fp8' with")
    (only,) = refusals(*(replace(side, engine="vLLM") for side in sides), AT)
    assert "quantization is None without, fp8 with" in only


def test_failures_of_one_side_are_not_diluted_by_the_other():
    pairs = made.pairs(AT[:1], [1.5])  # 8 rounds of 4 requests
    fails = replace(pairs[0].with_.answers[0], error="HTTP 500")
    bad = replace(pairs[0], with_=replace(pairs[0].with_, answers=(fails, *pairs[0].with_.answers[1:])))
    (one,) = found_at([bad, *pairs[1:]], AT[:1], 1)
    assert one.failed == 1 / 32


def test_a_mean_since_the_start_is_said_once_and_nothing_follows_from_it():
    mean = Speculation("SGLang /server_info", mean_length=2.75, notes=("since the server's start",))
    pairs = [replace(p, with_=replace(p.with_, speculation=mean)) for p in made.pairs(AT[:2], [1.5, 1.4])]
    results = made.results(pairs)
    row = results["rows"][0]
    assert row["acceptance"] is row["efficiency"] is row["step"] is None and row["word"] == "pays"
    said = [note for note in results["notes"] if "2.75" in note]
    assert said == ["acceptance length 2.75 at the end, says SGLang /server_info (since the server's start)"]


def test_a_cap_that_no_level_reaches_changes_nothing():
    sides = replace(PLAIN, max_running_requests=2048), replace(FAST, max_running_requests=48)
    assert refusals(*sides, AT[:2]) == []
    assert "a --concurrency up to 48" in refusals(*sides, AT)[0]
    assert refusals(*sides, [Level("request rate", 0.1)]), "how many run at a rate of arrival is not known before"


def test_a_path_and_a_hub_id_of_the_same_model_are_no_difference():
    assert refusals(replace(PLAIN, model="meta/llama-8b"), FAST, AT) == []
    assert refusals(replace(PLAIN, model=None, served="x"), replace(FAST, served="x"), AT) == []
    assert refusals(replace(PLAIN, model=None, served="x"), replace(FAST, served="y"), AT)


def test_all_that_is_wrong_is_said_at_once():
    assert len(refusals(replace(PLAIN, speculates=True, context_length=1), replace(FAST, model="other"), AT)) == 3


def test_the_whole_way_from_passes_to_a_verdict():
    """Requests of 0.1 s + 32 tokens, at 20 ms each without, and at known speeds with."""
    gains = [1.5, 1.2, 0.8]
    results = made.results(made.pairs(AT, gains, tasks=("chat", "code")), training_seconds=7200.0)
    verdict, rows = results["verdict"], results["rows"]
    assert verdict["outcome"] == "does not pay" and verdict["exit_code"] == 4 and 8 < verdict["break_even"] < 64
    assert [(r["level"]["value"], r["task"]) for r in rows[:3]] == [(1, "all"), (1, "chat"), (1, "code")]
    for row, gain in zip(rows[::3], gains, strict=True):
        truth = (0.1 + 32 * 0.02) / (0.1 + 32 * 0.02 / gain)
        assert row["low"] <= truth * 1.02 and truth * 0.98 <= row["high"]
        assert row["speedup"] == pytest.approx(truth, rel=0.02)
        assert row["with"]["per_user"] == pytest.approx(50 * gain, rel=0.03)
    hours = results["repaid"][0]["hours"]
    assert hours == pytest.approx(2 / (rows[0]["speedup"] - 1)) and results["repaid"][2]["hours"] is None
    assert rows[0]["acceptance"]["acceptance_length"] == 2.5
    assert rows[0]["acceptance"]["acceptance_rates"] == (0.8, 0.625, 0.4)
    assert rows[0]["step"]["with"] == pytest.approx(2.5 * 0.02 / 1.5, rel=0.03) and not rows[0]["step"]["measured"]
    assert results["agreement"]["same"] == results["agreement"]["answers"] == 2 * 8 * 3 * 4


def test_at_a_rate_of_arrival_the_users_speed_counts():
    """Tokens a second of all are those that arrive, whatever the server does."""
    rate = [Level("request rate", 4.0)]
    rows = made.results(made.pairs(rate, [1.5]))["rows"]
    assert rows[0]["speedup"] == pytest.approx((0.1 + 0.64) / (0.1 + 0.64 / 1.5), rel=0.02)
