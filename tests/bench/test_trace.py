"""Traces with known answers, broken ones, and one that PyTorch's profiler writes on the spot."""

from __future__ import annotations

import gzip
import json
import time

import pytest
import torch
from bench.traces import DECODES, READS, event, gpu_steps, kernel, write
from model_files import tiny_llama

from eyas.bench import trace
from eyas.bench.trace import TraceError, exclusive, read, shared, split


def parts(found) -> dict[str, float]:
    """In microseconds, of what takes any time."""
    return {part: pytest.approx(1e6 * seconds) for part, seconds in found.seconds.items() if seconds}


def test_steps_of_a_gpu(tmp_path):
    found = split(read(write(tmp_path / "t.json.gz", gpu_steps(10, 1000, 515))))
    assert found.device == "GPU" and found.steps == 10, "the last pass has no end"
    assert parts(found) == {"attention": 1000, "matmul": 3000, "allreduce": 5150, "idle": 850}
    record = found.as_record()
    assert record["shares"]["allreduce"] == pytest.approx(0.515)
    assert record["seconds"]["allreduce"] == pytest.approx(515e-6)
    assert sum(record["shares"].values()) == pytest.approx(1)
    assert record["longest"][0]["name"].startswith("ncclDevKernel_AllReduce") and len(record["longest"]) == 3
    assert record["longest"][0]["share"] == pytest.approx(0.515)


def test_steps_that_read_prompts_are_left_out(tmp_path):
    events = gpu_steps(2, 1000, 100)
    for one in events:
        if one["name"] == DECODES and one["ts"] in (1000, 800):
            one["name"] = READS
    found = split(read(write(tmp_path / "t.json", events)))
    assert found.steps == 1 and parts(found) == {"attention": 100, "matmul": 300, "allreduce": 100, "idle": 500}
    for one in events:
        if one["name"] == DECODES:
            one["name"] = READS
    with pytest.raises(TraceError, match="3 forward passes, and no whole step that only decodes"):
        split(read(write(tmp_path / "t.json", events)))


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("execute_context_0(0)_generation_8(32)", True),
        ("execute_64_context_1(sq64sk64sqsq4096sqsk4096)_generation_0(sq0sk0sqsq0sqsk0)", False),
        ("execute_8_context_0(sq0sk0sqsq0sqsk0)_generation_2(sq8sk90sqsq32sqsk360)", True),
        ("execute_new_0_cached_4", True),
        ("execute_new_1_cached_4", False),
        ("step[DECODE bs=4]", True),
        ("step[VERIFY bs=4]", True),
        ("step[EXTEND bs=1 toks=90]", False),
    ],
)
def test_passes_as_the_engines_mark_them(name, counts):
    marks = [event("gpu_user_annotation", name, at, 10, 0, 7) for at in (0, 100)]
    found = [trace._kept(e) for e in (*marks, kernel("nvjet_x", 0, 60), kernel("nvjet_x", 100, 60))]
    if counts:
        assert (split(found).steps, parts(split(found))) == (1, {"matmul": 60, "idle": 40})
    else:
        with pytest.raises(TraceError, match="no whole step that only decodes"):
            split(found)


def test_passes_of_a_drafter_are_no_steps():
    names = ("step[VERIFY bs=4]", "step[DRAFT bs=4]", "step[DRAFT bs=4]", "step[VERIFY bs=4]")
    marks = [event("user_annotation", name, 100 * n, 10) for n, name in enumerate(names)]
    found = split([trace._kept(e) for e in (*marks, kernel("nvjet_x", 0, 150))])
    assert found.steps == 1 and parts(found) == {"matmul": 150, "idle": 150}


def test_streams_that_overlap():
    spans = [
        (0, 100, "matmul", "a"),
        (50, 150, "allreduce", "b"),  # hidden behind a, then not
        (60, 80, "moe", "c"),  # beside a
        (140, 200, "copies", "d"),  # hidden behind b, then not
        (250, 300, "elementwise", "e"),
    ]
    found = shared([trace.Span(*span) for span in spans], [(0, 100), (100, 300)])
    known = {"matmul": 90, "moe": 10, "allreduce": 50, "copies": 50, "elementwise": 50, "idle": 50}
    assert {part: time for part, time in found.items() if time} == known
    clipped = shared([trace.Span(*span) for span in spans], [(70, 90), (260, 400)])
    assert {part: time for part, time in clipped.items() if time} == {
        "matmul": 15,
        "moe": 5,
        "elementwise": 40,
        "idle": 100,
    }


def test_the_busiest_device_and_its_streams_alone():
    other = kernel("nvjet_x", 0, 20, device=1)
    found = split([trace._kept(e) for e in (kernel("nvjet_x", 0, 30), kernel("rms_norm_kernel", 30, 10, 9), other)])
    assert parts(found) == {"matmul": 30, "elementwise": 10} and found.steps is None
    assert found.as_record()["seconds"] is None, "no time of a step where nobody counted the steps"
    assert split([trace._kept(other)], 4).as_record()["seconds"]["matmul"] == pytest.approx(5e-6)


def test_operators_of_a_cpu_are_counted_once():
    events = [
        event("cpu_op", "aten::linear", 0, 100),
        event("cpu_op", "aten::t", 5, 10),  # part of the product around it
        event("cpu_op", "aten::addmm", 20, 70),
        event("cpu_op", "vllm::unified_attention_with_output", 110, 60),
        event("cpu_op", "aten::bmm", 120, 20),  # of attention
        event("cpu_op", "aten::mul", 180, 20),
        event("cpu_op", "aten::empty", 200, 0),
        event("cpu_op", "aten::mm", 0, 90, tid=2),  # of a thread that does less
    ]
    found = split([trace._kept(e) for e in events])
    assert found.device == "CPU"
    assert parts(found) == {"matmul": 100, "attention": 60, "elementwise": 20, "idle": 20}
    assert [(name, round(1e6 * s)) for name, _, s in found.longest[:2]] == [
        ("aten::addmm", 70),
        ("vllm::unified_attention_with_output", 40),
    ]


def test_events_that_are_not_nested_are_not_counted_twice():
    events = [event("cpu_op", "aten::mm", 0, 100), event("cpu_op", "aten::mul", 50, 100)]
    found = list(exclusive([trace._kept(e) for e in events]))
    assert [(span.start, span.end) for span in found] == [(0, 50), (50, 150)]


def test_against_a_real_profiler(tmp_path):
    """A model's steps, marked as vLLM marks them: the parts come to the time on the clock and to PyTorch's sums."""
    model = tiny_llama(hidden_size=128, intermediate_size=256, num_hidden_layers=4).eval()
    ids, begins = torch.ones(1, 8, dtype=torch.long), list[float]()
    with torch.inference_mode():
        model(ids)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for n in range(7):
                begins.append(time.perf_counter())
                with torch.profiler.record_function(DECODES if n else READS):
                    model(ids).logits.argmax(-1)
    file = tmp_path / "rank0.pt.trace.json.gz"
    profiler.export_chrome_trace(str(file))
    events = read(file)
    found = split(events)
    assert found.steps == 5 and sum(found.seconds.values()) == pytest.approx(begins[6] - begins[1], rel=0.05, abs=2e-4)
    assert found.seconds["matmul"] > 0 and found.seconds["attention"] > 0 and found.seconds["elementwise"] > 0
    mine = dict[str, float]()
    for span in exclusive(one for one in events if one.kind == "cpu_op"):
        mine[span.name] = mine.get(span.name, 0.0) + span.end - span.start
    theirs = {one.key: one.self_cpu_time_total for one in profiler.key_averages()}
    for name in sorted(mine, key=mine.__getitem__)[-5:]:
        assert mine[name] == pytest.approx(theirs[name], rel=0.02), name


def test_what_cannot_be_read(tmp_path, monkeypatch):
    whole = gzip.compress(b'{"traceEvents": [' + b"1," * 9999 + b"1]}")
    cases = {
        "absent.json": (None, "cannot be read"),
        "cut.json.gz": (whole[:-30], "cannot be read"),
        "plain.json.gz": (b"{}", "cannot be read"),
        "cut.json": (b'{"traceEvents": [{"ph": "X", ', "was cut off"),
        "other.json": (b'{"events": []}', "no list of traceEvents"),
        "list.json": (b"[]", "no list of traceEvents"),
        "timeless.json": (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k"}]}', "'k' has no time"),
        "endless.json": (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "dur": Infinity}]}', "for ever"),
        "long.json": (b" " * 5000, "MiB unpacked and is not read"),
        "bomb.json.gz": (gzip.compress(b" " * 5_000_000), "MiB unpacked and is not read"),
    }
    monkeypatch.setattr(trace, "MOST", 4096)
    for name, (content, words) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        if "cut.json.gz" in name:
            monkeypatch.setattr(trace, "MOST", 1 << 20)
        with pytest.raises(TraceError, match=words):
            read(tmp_path / name)
        monkeypatch.setattr(trace, "MOST", 4096)
    for events in ([], [event("user_annotation", DECODES, 0, 10)]):
        with pytest.raises(TraceError, match="nothing was computed"):
            split(read(write(tmp_path / "t.json", events)))
    with pytest.raises(TraceError, match="takes any time"):
        split(read(write(tmp_path / "t.json", [kernel("nvjet_x", 5, 0)])))


@pytest.mark.parametrize(("event", "said"), [({"ts": 1, "dur": 0}, "takes any time"), ({"ts": 10**400}, "has no time")])
def test_an_operator_without_time(tmp_path, event, said):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", **event}]}))
    with pytest.raises(trace.TraceError, match=said):
        trace.split(trace.read(path))
