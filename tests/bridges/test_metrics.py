"""One run of drafts, told in every way the engines tell it, must come out the same.

The formats are the engines' own, read in their source. SGLang 0.5.8 and 0.5.9: srt/managers/tokenizer_manager.py
(_calculate_spec_decoding_metrics), scheduler_metrics_mixin.py (log_decode_stats) and scheduler.py (get_internal_state)
beside it. SGLang 0.5.23: the same method of tokenizer_manager.py, srt/managers/scheduler_components/
metrics_reporter.py and internal_state.py, srt/observability/metrics_collector.py. vLLM 0.32: v1/spec_decode/metrics.py,
v1/metrics/stats.py.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from eyas.bridges import metrics
from eyas.bridges.metrics import CounterReset, Exposition, MetricsError, Speculation
from eyas.bridges.sglang import metrics as sglang
from eyas.bridges.vllm import metrics as vllm
from eyas.core import DraftShape
from eyas.engine.stats import AcceptanceStats

K = 3
SHAPE = DraftShape(num_steps=K, eagle_topk=1, num_draft_tokens=K + 1)
TREE = DraftShape(num_steps=3, eagle_topk=2, num_draft_tokens=6)


def chances(steps: int, seed: int = 0, drafts: int = K) -> list[int]:
    """How many draft tokens each step accepted."""
    generator = random.Random(seed)
    return [next((i for i in range(drafts) if generator.random() > 0.6), drafts) for _ in range(steps)]


def flat(runs: list[list[int]]) -> list[int]:
    return [accepted for run in runs for accepted in run]


def histogram(accepted: list[int], length: int = 0) -> list[int]:
    return [accepted.count(j) for j in range(max(length, max(accepted) + 1))]


def by_eyas(accepted: list[int], drafts: int = K) -> Speculation:
    stats = AcceptanceStats()
    for hits in accepted:
        stats.record(drafts, drafts, hits, hits + 1)
    assert metrics.from_stats(stats).acceptance_length == stats.acceptance_length
    assert list(metrics.from_stats(stats).acceptance_rates or ()) == stats.acceptance_rates
    return metrics.from_stats(stats)


def assert_same(one: Speculation, other: Speculation) -> None:
    left, right = one.as_record(), other.as_record()
    for told in ("source", "notes", "emitted"):
        del left[told], right[told]
    assert left == right


# What each version writes into a request's meta_info


def meta_058(accepted: list[int], completion: int) -> dict[str, Any]:
    steps = len(accepted)
    return {
        "id": "a",
        "completion_tokens": completion,
        "spec_accept_rate": sum(accepted) / (steps * K),
        "spec_accept_length": completion / steps,
        "spec_accept_token_num": sum(accepted),
        "spec_draft_token_num": steps * K,
        "spec_verify_ct": steps,
    }


def meta_059(accepted: list[int], completion: int) -> dict[str, Any]:
    return meta_058(accepted, completion) | {"spec_accept_histogram": histogram(accepted)}


def meta_0523(accepted: list[int], completion: int) -> dict[str, Any]:
    steps = len(accepted)
    return {
        "completion_tokens": completion,
        "spec_accept_rate": sum(accepted) / (steps * K),
        "spec_accept_length": completion / steps,
        "spec_num_correct_drafts": sum(accepted),
        "spec_num_proposed_drafts": steps * K,
        "spec_verify_ct": steps,
        "spec_correct_drafts_histogram": histogram(accepted),
    }


def emitted(accepted: list[int]) -> int:
    """The prefill's token, then accepted ones and a bonus token at each step."""
    return 1 + sum(accepted) + len(accepted)


def requests(seed: int = 0, number: int = 4) -> list[list[int]]:
    return [chances(20 + 5 * i, seed + i) for i in range(number)]


@pytest.mark.parametrize("meta", [meta_059, meta_0523])
def test_meta_info(meta: Any) -> None:
    runs = requests()
    plain = {"completion_tokens": 1, "spec_verify_ct": 0}
    told = sglang.from_requests([*(json.loads(json.dumps(meta(run, emitted(run)))) for run in runs), plain], SHAPE)
    assert_same(told, by_eyas(flat(runs)))
    assert told.notes == ("1 requests without a verify step",)
    one = meta(runs[0], emitted(runs[0]))
    alone = sglang.from_requests([one], SHAPE).acceptance_length
    assert alone is not None and one["spec_accept_length"] - alone == pytest.approx(1 / len(runs[0]))  # the prefill


def test_meta_info_without_a_histogram_leaves_positions_unknown() -> None:
    runs = requests()
    told = sglang.from_requests([meta_058(run, emitted(run)) for run in runs], SHAPE)
    expected = by_eyas(flat(runs))
    assert (told.steps, told.drafted, told.accepted) == (expected.steps, expected.drafted, expected.accepted)
    assert told.acceptance_length == expected.acceptance_length
    assert told.acceptance_rates is None and told.acceptance_rate_bounds is None
    mixed = sglang.from_requests([meta_058(runs[0], 9), meta_059(runs[1], 9)], SHAPE)
    assert mixed.accepted_at is None and mixed.steps == len(runs[0]) + len(runs[1])


def test_what_an_answers_end_cuts_off_is_not_emitted() -> None:
    """Accepted drafts behind an end-of-text token count as accepted, and reach no answer."""
    meta = meta_0523([3, 3, 3], completion=1 + 4 + 4 + 1)
    told = sglang.from_requests([meta], SHAPE)
    assert (told.accepted, told.emitted) == (9, 9)
    assert told.acceptance_length == 3.0
    assert told.acceptance_rates == (1.0, 1.0, 1.0)
    del meta["completion_tokens"]
    assert sglang.from_requests([meta], SHAPE).acceptance_length == 4.0


def test_a_tree_leaves_what_reached_a_position_between_bounds() -> None:
    """Three steps, two accepted twice: but how deep was the tree that accepted one?"""
    meta = {
        "spec_verify_ct": 4,
        "spec_num_correct_drafts": 5,
        "spec_num_proposed_drafts": 20,
        "spec_correct_drafts_histogram": [1, 1, 2],
    }
    told = sglang.from_requests([meta], TREE)
    assert (told.acceptance_length, told.drafted) == (2.25, 20)
    assert told.accepted_at == (3, 2, 0)
    assert told.acceptance_rates is None
    assert told.acceptance_rate_bounds == ((0.75, 1.0), (2 / 3, 1.0), (0.0, 0.0))
    assert sglang.from_requests([meta]).accepted_at is None  # of unknown shape


def test_a_histogram_that_does_not_fit_is_left_out() -> None:
    told = sglang.from_requests([meta_059([1, 2], 6) | {"spec_accept_histogram": [0, 1, 5]}], SHAPE)
    assert told.accepted_at is None
    assert told.acceptance_length == 2.5
    assert any("does not fit" in note for note in told.notes)


def test_server_info() -> None:
    """avg_spec_accept_length is a mean over the server's life: no counts, one for each rank."""
    info = {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
        "version": "0.5.23",
        "internal_states": [{"last_gen_throughput": 63.6, "avg_spec_accept_length": 1.68}],
    }
    assert sglang.draft_shape(info) == SHAPE
    told = sglang.from_server_info(info)
    assert told.acceptance_length == 1.68
    assert (told.steps, told.drafted, told.accepted, told.acceptance_rates) == (None,) * 4
    two = [{"avg_spec_accept_length": 1.5}, {"avg_spec_accept_length": 2.5}]
    ranks = sglang.from_server_info({"internal_states": two})
    assert ranks.acceptance_length is None
    assert any("ranks differ (1.50, 2.50)" in note for note in ranks.notes)
    idle = sglang.from_server_info({"internal_states": [{"last_gen_throughput": 0.0}]})
    assert idle.acceptance_length is None and "nothing was verified yet" in idle.notes
    assert sglang.draft_shape({"speculative_num_steps": None}) is None


# Prometheus pages as the engines' own client library writes them

SGLANG_LABELS = {"model_name": "m", "engine_type": "unified", "tp_rank": "0"}


def sglang_page(counters: dict[str, int], gauges: dict[str, float] | None = None) -> str:
    registry = CollectorRegistry()
    for name, value in counters.items():
        extra = {} if "verify" in name else {"is_streaming": "false"}
        labels = SGLANG_LABELS | extra
        Counter(f"sglang:{name}_total", "help", list(labels), registry=registry).labels(**labels).inc(value)
    for name, length in (gauges or {}).items():
        Gauge(f"sglang:{name}", "help", list(SGLANG_LABELS), registry=registry).labels(**SGLANG_LABELS).set(length)
    return generate_latest(registry).decode()


def without_created(page: str) -> str:
    """Two pages made here are of two registries, so of two moments; one process has the same moment on both."""
    return "".join(line for line in page.splitlines(keepends=True) if "_created" not in line)


def test_sglang_counters_are_differenced() -> None:
    early, late = requests(), requests(50, 6)
    runs = early + late

    def page(runs: list[list[int]]) -> str:
        told = {
            "spec_verify_calls": sum(map(len, runs)),
            "generation_tokens": sum(map(emitted, runs)) + 3,
            "num_requests": len(runs) + 3,  # three requests that were done after their prefill
        }
        return without_created(sglang_page(told, {"spec_accept_length": 2.0, "spec_accept_rate": 0.3}))

    expected = by_eyas(flat(late))
    told = sglang.from_prometheus(page(runs), page(early), SHAPE)
    assert (told.steps, told.drafted, told.emitted) == (expected.steps, expected.drafted, expected.emitted)
    assert told.acceptance_length == expected.acceptance_length
    assert told.accepted is None and told.acceptance_rates is None
    assert sglang.from_prometheus(page(runs), page(early)).drafted is None
    assert sglang.from_prometheus(page(runs)).steps == sum(map(len, runs))
    nothing = sglang.from_prometheus(page(early), page(early))
    assert (nothing.steps, nothing.acceptance_length) == (0, None)
    with pytest.raises(CounterReset, match="started again"):
        sglang.from_prometheus(page(early), page(runs))


def test_older_sglang_has_a_gauge_only() -> None:
    told = sglang.from_prometheus(sglang_page({"generation_tokens": 9}, {"spec_accept_length": 1.68}))
    assert told.acceptance_length == 1.68
    assert told.steps is None
    assert any("of the last logging interval, not of the run" in note for note in told.notes)
    idle = sglang.from_prometheus(sglang_page({}, {"spec_accept_length": 0.0}))
    assert idle.acceptance_length is None
    with pytest.raises(MetricsError, match="--enable-metrics"):
        sglang.from_prometheus(sglang_page({"generation_tokens": 9}))


def sglang_log(length: float, rate: float, running: int, extra: str = "") -> str:
    return (
        f"[2026-03-01 12:00:00 TP0] Decode batch [40], #running-req: {running}, #token: 1024, token usage: 0.02, "
        f"accept len: {length:.2f}, accept rate: {rate:.2f}, {extra}cuda graph: True, gen throughput (token/s): 63.60, "
        "#queue-req: 0"
    )


def test_sglang_log() -> None:
    log = "\n".join(
        [
            "[2026-03-01 12:00:00 TP0] Prefill batch, #new-seq: 1, #new-token: 12",
            sglang_log(1.5, 0.38, 1),
            sglang_log(2.5, 0.63, 3, "cap len: 3.00, "),
        ]
    )
    told = sglang.from_log(log)
    assert told.acceptance_length == pytest.approx((1.5 + 3 * 2.5) / 4)
    assert told.steps is None
    assert any("estimate" in note for note in told.notes)
    assert [interval.running for interval in sglang.log_intervals(log)] == [1, 3]


@pytest.mark.parametrize("accepted", [0, 40, 131, 333])
def test_the_two_accept_rates_of_the_log_are_told_apart(accepted: int) -> None:
    """Up to 0.5.9 (accepted + bonus) / (forwards x 4 draft tokens), in 0.5.23 accepted / (forwards x 3)."""
    forwards, tokens = 120, 4
    length = 1 + accepted / forwards
    older = sglang_log(length, (accepted + forwards) / (forwards * tokens), 1)
    newer = sglang_log(length, accepted / (forwards * (tokens - 1)), 1)
    assert sglang.log_intervals(older)[0].counts_bonus(tokens) is True
    assert sglang.log_intervals(newer)[0].counts_bonus(tokens) is False


def test_where_both_readings_of_the_log_fit_none_is_chosen() -> None:
    assert sglang.log_intervals(sglang_log(4.0, 1.0, 1))[0].counts_bonus(4) is None
    assert sglang.log_intervals(sglang_log(2.0, 0.9, 1))[0].counts_bonus(4) is None


def test_the_founding_case() -> None:
    """SGLang 0.5.9 with 4 draft tokens: "25%" of the decode log is an acceptance length of 1.00, so nothing was ever
    accepted, and "42%" is 1.68. By meta_info of the same version they would be 1.75 and 2.26."""
    log, meta = sglang.meanings(0.25, 4)
    assert "up to 0.5.9" in log.counter
    assert (log.least, log.most) == (1.0, 1.0)
    assert meta.least == pytest.approx(1.75)
    log, meta = sglang.meanings(0.42, 4)
    assert log.least == pytest.approx(1.68)
    assert meta.least == pytest.approx(2.26)
    assert not sglang.meanings(0.15, 4)[0].possible  # less than the bonus token alone
    (interval,) = sglang.log_intervals(sglang_log(1.00, 0.25, 1))
    assert interval.counts_bonus(4) is True
    assert sglang.from_log(sglang_log(1.00, 0.25, 1)).acceptance_length == 1.0
    average, first = vllm.meanings(0.15, 4)
    assert average.least == average.most == pytest.approx(1.45)
    assert (first.least, first.most) == (pytest.approx(1.15), pytest.approx(1.45))


# vLLM


def vllm_request(steps: list[tuple[int, int]], detailed: bool = False) -> dict[str, Any]:
    """Of (accepted, drafted) pairs: RequestSpecDecodeMetrics.to_dict in a response's metrics."""
    accepted = [a for a, _ in steps]
    drafted = sum(d for _, d in steps)
    said: dict[str, Any] = {
        "mean_acceptance_length": 1 + sum(accepted) / len(steps),
        "draft_acceptance_rate": sum(accepted) / drafted if drafted else 0.0,
        "acceptance_histogram": histogram(accepted, K + 1),
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": drafted,
        "num_spec_tokens": K,
    }
    if detailed:
        said |= {"per_step_accepted": accepted, "per_step_drafted": [d for _, d in steps]}
    return json.loads(json.dumps({"speculative_decoding": said}))


@pytest.mark.parametrize("detailed", [False, True])
def test_vllm_requests(detailed: bool) -> None:
    runs = requests()
    told = vllm.from_requests([vllm_request([(a, K) for a in run], detailed) for run in runs])
    assert_same(told, by_eyas(flat(runs)))
    bare = vllm.from_requests([vllm_request([(a, K) for a in run])["speculative_decoding"] for run in runs])
    assert_same(bare, told)


def test_vllm_requests_with_drafts_of_different_lengths() -> None:
    steps = [(3, 3), (1, 3), (2, 2), (0, 1), (1, 1)]
    exact = vllm.from_requests([vllm_request(steps, detailed=True)])
    assert exact.reached_at == (5, 3, 1)  # of the drafts accepted before, those that were that long
    assert exact.acceptance_rates == (4 / 5, 2 / 3, 1.0)
    summary = vllm.from_requests([vllm_request(steps)])
    assert summary.acceptance_length == exact.acceptance_length == 2.4
    assert summary.acceptance_rates is None
    bounds = summary.acceptance_rate_bounds or ()
    for rate, bound in zip(exact.acceptance_rates, bounds, strict=True):
        assert rate is not None and bound is not None and bound[0] <= rate <= bound[1]


VLLM = ("drafts", "draft_tokens", "accepted_tokens")


def vllm_page(runs: dict[str, list[list[int]]], drafts: int = K, short: int = 0, created: bool = False) -> str:
    """As SpecDecodingProm counts: one label set for each engine, positions from 0."""
    registry = CollectorRegistry()
    labels = ["model_name", "engine"]
    totals = [Counter(f"vllm:spec_decode_num_{name}", "help", labels, registry=registry) for name in VLLM]
    positions = Counter("vllm:spec_decode_num_accepted_tokens_per_pos", "h", [*labels, "position"], registry=registry)
    for engine, steps in runs.items():
        accepted = flat(steps)
        for total, value in zip(totals, (len(accepted), len(accepted) * drafts - short, sum(accepted)), strict=True):
            total.labels("m", engine).inc(value)
        for position in range(drafts):
            positions.labels("m", engine, str(position)).inc(sum(a > position for a in accepted))
    page = generate_latest(registry).decode()
    return page if created else without_created(page)


def test_vllm_counters_are_differenced_and_summed_over_engines() -> None:
    early, late = requests(), requests(50)
    before, after = vllm_page({"0": early, "1": early[:1]}), vllm_page({"0": early + late, "1": early[:1] + late[1:]})
    assert_same(vllm.from_prometheus(after, before), by_eyas(flat(late + late[1:])))
    assert_same(vllm.from_prometheus(before), by_eyas(flat([*early, early[0]])))
    assert_same(vllm.from_prometheus(after, before, model="m"), vllm.from_prometheus(after, before))
    with pytest.raises(MetricsError, match="does not speculate"):
        vllm.from_prometheus(after, before, model="another")
    grown = vllm.from_prometheus(vllm_page({"0": early, "2": late}), vllm_page({"0": early}))  # a rank that came later
    assert_same(grown, by_eyas(flat(late)))


def test_vllm_counters_with_short_drafts_give_bounds() -> None:
    run = [[3, 1, 2, 0, 1, 3, 3, 3]]
    told = vllm.from_prometheus(vllm_page({"0": run}, short=2))
    assert told.acceptance_rates is None
    assert told.acceptance_rate_bounds == ((7 / 8, 1.0), (5 / 7, 1.0), (4 / 5, 1.0))
    assert told.drafted == 22
    assert any("between bounds" in note for note in told.notes)


def test_a_restart_is_noticed() -> None:
    early, late = requests(), requests(50)
    with pytest.raises(CounterReset, match="the engine was restarted"):
        vllm.from_prometheus(vllm_page({"0": early[:1]}), vllm_page({"0": early}))
    with pytest.raises(CounterReset, match="started again"):
        vllm.from_prometheus(vllm_page({"1": late}), vllm_page({"0": early}))  # an engine is gone
    before = vllm_page({"0": early[:1]}, created=True)
    with pytest.raises(CounterReset, match="started again"):  # higher counts, but of a later process
        vllm.from_prometheus(vllm_page({"0": early}, created=True), before)
    assert vllm.from_prometheus(before, before).steps == 0


def test_parts_add_up() -> None:
    early, late = chances(30), chances(40, 7)
    assert_same(by_eyas(early).plus(by_eyas(late)), by_eyas(early + late))
    assert by_eyas(early).plus(Speculation("x", mean_length=2.0)).acceptance_length is None  # a mean has no weight


# Nothing is made up


def test_unknown_stays_unknown() -> None:
    nothing = Speculation("x")
    assert nothing.acceptance_length is None
    assert nothing.acceptance_rates is None
    assert nothing.acceptance_rate_bounds is None
    assert Speculation("x", steps=0, accepted=0).acceptance_length is None
    never = Speculation("x", 2, 6, 0, accepted_at=(0, 0, 0), reached_at=(2, 0, 0))
    assert never.acceptance_rates == (0.0, None, None)
    json.dumps(never.as_record())


@pytest.mark.parametrize(
    "text",
    [
        "<html>404</html>",
        "a{b 1",
        "vllm:spec_decode_num_drafts_total{",
        "x y z\n",
        "\x00\x01",
        '{"detail":"Not Found"}',
    ],
)
def test_garbage_is_no_page(text: str) -> None:
    for read in (sglang.from_prometheus, vllm.from_prometheus):
        with pytest.raises(MetricsError):
            read(text)


@pytest.mark.parametrize("value", ["NaN", "-5", "1.5", "+Inf"])
def test_odd_values_are_no_counts(value: str) -> None:
    page = "\n".join(f'vllm:spec_decode_num_{name}_total{{engine="0"}} {value}' for name in VLLM) + "\n"
    with pytest.raises(MetricsError, match="expected a count"):
        vllm.from_prometheus(page)


def test_garbage_of_other_kinds() -> None:
    for meta in ({"spec_verify_ct": "3"}, {"spec_verify_ct": True}, {"spec_verify_ct": -1}, "text", None):
        with pytest.raises(MetricsError):
            sglang.from_requests([meta])  # type: ignore[list-item]
    for metas in ([], [{}], [{"spec_verify_ct": 0}]):
        with pytest.raises(MetricsError, match="none was speculated for"):
            sglang.from_requests(metas)
    with pytest.raises(MetricsError, match="expected a list of counts"):
        sglang.from_requests([meta_059([1], 3) | {"spec_accept_histogram": [1.5]}])
    for info in ({}, {"internal_states": None}, {"internal_states": [3]}):
        with pytest.raises(MetricsError, match="not SGLang's answer"):
            sglang.from_server_info(info)
    with pytest.raises(MetricsError, match="expected numbers"):
        sglang.from_server_info({"internal_states": [{"avg_spec_accept_length": "2"}]})
    with pytest.raises(MetricsError, match="--enable-per-request-metrics"):
        vllm.from_requests([{"time_to_first_token_ms": 1.0}, {"speculative_decoding": None}])
    broken = vllm_request([(1, 3)])
    broken["speculative_decoding"]["acceptance_histogram"] = [5, 0, 0, 0]
    with pytest.raises(MetricsError, match="does not fit"):
        vllm.from_requests([broken])
    with pytest.raises(MetricsError, match="did not speculate"):
        sglang.from_log("INFO: Application startup complete.")
    position = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="first"} 1\n'
    with pytest.raises(MetricsError, match="expected a position"):
        vllm.from_prometheus(vllm_page({"0": [[1]]}) + position)


def test_an_exposition_keeps_labels_apart() -> None:
    page = Exposition.parse('a_total{x="1"} 2\na_total{x="2"} 3\n')
    assert sum(page.values("a_total").values()) == 5
    assert list(page.values("a_total", x="2").values()) == [3.0]
    assert page.values("b_total") == {}
