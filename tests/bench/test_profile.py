"""Launched engines profiled after a benchmark: acted ones here, the real vLLM in tests/engines."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench import profilers
from bench.servers import Server, serving
from bench.test_launched import LEVELS, PARAMS, asked, pair, starts  # noqa: F401  fixtures
from bench.traces import gpu_steps, kernel, write
from bridges.launching import engine
from bridges.wheels import wheel
from fastapi import FastAPI, Request, Response

from eyas.bench import profile
from eyas.bench.client import Endpoint
from eyas.bench.launched import both
from eyas.bench.passes import BenchError
from eyas.bench.profile import STEPS, Profiled, prepared, profiles, rank_zero
from eyas.bench.sides import EndpointSide
from eyas.bench.trace import TraceError
from eyas.bench.workload import Prompt, Workload
from eyas.bridges.code.source import open_engine
from eyas.bridges.profiling import Profiling
from eyas.bridges.sglang import launch as sglang
from eyas.bridges.vllm import launch as vllm
from eyas.core import DraftShape, UsageError

PROMPTS = tuple(Prompt(f"birds/{n}", "birds", [{"role": "user", "content": f"w{n}"}]) for n in range(4))


def profiled(asked, out: Path, first: int = 0):  # noqa: F811
    sides, _ = both(asked(), DraftShape(3, 1, 4), PARAMS, side_by_side=True, running=2, log=out)
    return profiles(prepared(sides, out)[first:], Workload({"birds": PROMPTS}, "mine"), LEVELS, PARAMS)


def test_either_side_at_each_level(asked, tmp_path):  # noqa: F811
    profilers.with_config(tmp_path / "vllm")
    found, notes = asyncio.run(profiled(asked, tmp_path / "r.json"))
    assert notes == [] and [entry["level"]["value"] for entry in found] == [1, 2]
    assert starts(tmp_path) == [0, 3], "one launch of each side, one after the other"
    for entry in found:
        plain, drafting = entry["without"], entry["with"]
        assert plain["steps"] == drafting["steps"] == STEPS and plain["ranks"] == 2
        assert plain["shares"]["allreduce"] == pytest.approx(0.515), "rank 1 waited longer, and is not looked at"
        assert plain["seconds"]["attention"] == pytest.approx(1e-4)
        assert drafting["seconds"]["idle"] == pytest.approx(1.085e-3)
        assert sum(drafting["shares"].values()) == pytest.approx(1)
        assert plain["running"] == entry["level"]["value"] and "rank0" in plain["trace"]
        assert Path(plain["trace"]).parent == tmp_path / "r.without.traces"
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("refuses", "POST /start_profile answers 500 'the profiler is broken'"),
        ("writes nothing", "the engine wrote no trace"),
        ("cut off", "cannot be read"),
    ],
)
def test_what_goes_wrong_is_said(asked, tmp_path, monkeypatch, fault, words):  # noqa: F811
    profilers.with_config(tmp_path / "vllm")
    monkeypatch.setenv("FAULT", f"with: {fault}")
    found, notes = asyncio.run(profiled(asked, tmp_path / "r.json", first=1))
    assert found == [], "of the side with speculation, which alone was asked for"
    assert [note.split(":")[0] for note in notes] == [f"no profile with speculation at concurrency {n}" for n in (1, 2)]
    assert all(words in note for note in notes), notes


def test_one_that_dies_meanwhile(asked, tmp_path, monkeypatch):  # noqa: F811
    profilers.with_config(tmp_path / "vllm")
    monkeypatch.setenv("DIES", "without@2")
    monkeypatch.setenv("PAUSE", "0.01")
    found, notes = asyncio.run(profiled(asked, tmp_path / "r.json"))
    assert all(entry["without"] is None and entry["with"] for entry in found) and notes, (found, notes)


class SGLang(Server):
    """Profiles as SGLang does: a decode stage that is whole ends by itself, and then there is nothing to stop."""

    busy: int = 1  # times that it still writes an earlier profile
    whole: bool = True

    def page(self) -> str:
        return super().page().replace("vllm:", "sglang:")

    def app(self) -> FastAPI:
        app = super().app()

        @app.post("/start_profile")
        async def start(request: Request) -> Response:
            self.asked_for = await request.json()
            name, folder = self.asked_for["profile_prefix"], Path(self.asked_for["output_dir"])
            if self.busy:
                self.busy -= 1
                write(folder / "eyas-earlier-1.5-TP-0-DECODE.trace.json.gz", [kernel("Memset", 0, 9e9)])
                return Response("Profiling is already in progress.", 500)
            kernels = [
                event
                for event in gpu_steps(self.asked_for["num_steps"] - 1, 1000, 515)
                if "annotation" not in event["cat"]
            ]
            for rank in (1, 0):
                file = f"{name}-1.5-TP-{rank}{'-DECODE' if self.whole else ''}.trace.json.gz"
                write(folder / file, kernels if rank == 0 else [])
            return Response()

        @app.post("/stop_profile")
        def stop() -> Response:
            return Response("Profiling is not in progress. Call /start_profile first.", 500)

        return app


def sglang_side(server: Server, folder: Path) -> Profiled:
    side = EndpointSide("with", Endpoint(server.url, model="m"), replace(PARAMS, max_tokens=256))
    side.plan, side.server = SimpleNamespace(asked=SimpleNamespace(engine="sglang")), None
    return Profiled(side, sglang.profiling(None, folder, STEPS), folder)


@pytest.mark.parametrize("whole", [True, False])
def test_decode_steps_that_sglang_counts(tmp_path, whole):
    async def go(server: SGLang) -> dict:
        one = sglang_side(server, tmp_path)
        try:
            return await profile._profile(one, PROMPTS, 3)
        finally:
            await one.side.close()

    server = SGLang(pause=0.02)
    server.whole = whole
    with serving(server) as running:
        found = asyncio.run(go(running))
    wanted = {"num_steps": STEPS, "profile_by_stage": True, "activities": ["CPU", "GPU"], "output_dir": str(tmp_path)}
    assert wanted.items() <= server.asked_for.items()
    assert server.most_running == 3 and found["ranks"] == 2 and "TP-0" in found["trace"]
    assert found["shares"]["allreduce"] == pytest.approx(5150 / 9915), "from the first kernel to the last one's end"
    if whole:
        assert found["steps"] == STEPS and found["seconds"]["attention"] == pytest.approx(1e-4)
    else:
        assert found["steps"] is None and found["seconds"] is None, "broken off: nobody knows after how many"


def test_a_server_that_does_not_count_first_tokens(tmp_path):
    async def go(server: Server) -> None:
        one = sglang_side(server, tmp_path)
        try:
            await profile._profile(one, PROMPTS, 1)
        finally:
            await one.side.close()

    with serving(Server()) as server, pytest.raises(BenchError, match="do not count first tokens"):
        asyncio.run(go(server))


def test_requests_that_do_not_run_at_once(tmp_path):
    async def go(server: SGLang) -> None:
        one = sglang_side(server, tmp_path)
        one.side.sampling = replace(PARAMS, max_tokens=1)
        try:
            await profile._profile(one, PROMPTS, 3)
        finally:
            await one.side.close()

    with (
        serving(SGLang(faults=[500], pause=0.2)) as server,
        pytest.raises(BenchError, match="3 requests do not decode together"),
    ):
        asyncio.run(go(server))


class OldVLLM(Server):
    """Writes what its front end and its workers did when it is told to stop, and never stops by itself."""

    folder: Path
    begin: float
    profiled: float = 0.0

    def app(self) -> FastAPI:
        app = super().app()

        @app.post("/start_profile")
        def start() -> Response:
            self.begin = time.monotonic()
            return Response()

        @app.post("/stop_profile")
        def stop() -> Response:
            self.profiled = time.monotonic() - self.begin
            write(self.folder / "a_12.async_llm.1.pt.trace.json.gz", [])
            write(self.folder / "b_13.rank0.1.pt.trace.json.gz", gpu_steps(STEPS, 1000, 515))
            return Response()

        return app


def test_an_engine_that_does_not_stop_by_itself(tmp_path, monkeypatch):
    """It is stopped after a glance, and its front end's trace is none of a worker."""
    monkeypatch.setattr(profile, "GLANCE", 0.3)

    async def go(server: OldVLLM) -> dict:
        side = EndpointSide("with", Endpoint(server.url, model="m"), replace(PARAMS, max_tokens=256))
        side.plan, side.server = SimpleNamespace(asked=SimpleNamespace(engine="vllm")), None
        try:
            return await profile._profile(Profiled(side, Profiling(ends=False), tmp_path), PROMPTS, 2)
        finally:
            await side.close()

    server = OldVLLM(pause=0.02)
    server.folder = tmp_path
    with serving(server) as running:
        found = asyncio.run(go(running))
    assert 0.3 <= server.profiled < 3 and found["ranks"] == 1 and "rank0" in found["trace"]
    assert found["shares"]["allreduce"] == pytest.approx(0.515)


def test_the_first_rank():
    names = ["dp0_pp0_tp1_dcp0_ep1_rank1.2.pt.trace.json.gz", "dp0_pp0_tp0_dcp0_ep0_rank0.9.pt.trace.json.gz"]
    assert rank_zero([Path(name) for name in names]) == (Path(names[1]), 2)
    names = ["eyas-1-17.5-TP-10-DECODE.trace.json.gz", "eyas-1-17.5-TP-2-DECODE.trace.json.gz"]
    assert rank_zero([Path(name) for name in names])[0] == Path(names[1])
    with pytest.raises(TraceError, match="wrote no trace"):
        rank_zero([])


# What engines are launched with


def test_todays_vllm(tmp_path):
    place = profilers.with_config(engine(tmp_path, "vllm"))
    how = vllm.profiling(open_engine("vllm", place), tmp_path / "t", 10)
    config = {
        "profiler": "torch",
        "torch_profiler_dir": str(tmp_path / "t"),
        "torch_profiler_with_stack": False,
        "ignore_frontend": True,
        "max_iterations": 11,
    }
    assert how.flags[0] == "--profiler-config" and json.loads(how.flags[1]) == config
    assert how.ends and not how.variables and not how.asked


def test_a_profiler_of_ones_own(asked, tmp_path):  # noqa: F811
    given = asked("--profiler-config.profiler=cuda")
    sides, _ = both(given, DraftShape(3, 1, 4), PARAMS, side_by_side=True, running=2, log=tmp_path / "r.json")
    with pytest.raises(UsageError, match="--profiler-config is for --profile to give"):
        prepared(sides, tmp_path / "r.json")


def test_an_older_vllm_that_counts_its_steps(tmp_path):
    place = engine(tmp_path, "vllm")
    names = ("VLLM_TORCH_PROFILER_DIR", "VLLM_PROFILER_MAX_ITERS", "VLLM_TORCH_PROFILER_DISABLE_ASYNC_LLM")
    (place / "vllm" / "envs.py").write_text(f"x = {names}")
    how = vllm.profiling(open_engine("vllm", place), tmp_path / "t", 10)
    assert how.variables == dict(zip(names, (str(tmp_path / "t"), "11", "1"), strict=True)) and how.ends


def test_an_older_vllm_and_one_without(tmp_path):
    place = engine(tmp_path, "vllm")
    with pytest.raises(UsageError, match="has neither ProfilerConfig nor VLLM_TORCH_PROFILER_DIR"):
        vllm.profiling(open_engine("vllm", place), tmp_path / "t", 10)
    how = vllm.profiling(open_engine("vllm", profilers.with_variables(place)), tmp_path / "t", 10)
    known = {"VLLM_TORCH_PROFILER_DIR": str(tmp_path / "t"), "VLLM_TORCH_PROFILER_WITH_STACK": "0"}
    assert (how.flags, how.variables) == ((), known) and not how.ends, "it cannot count, so it is told when to stop"


@pytest.mark.parametrize("version", ["0.5.8", "0.5.9", "0.5.23"])
def test_sglang_takes_what_it_is_asked(tmp_path, version):
    """Each key is a field of what the published server reads, and decode steps get a file of their own."""
    source = open_engine("sglang", wheel(f"sglang-{version}"))
    how = sglang.profiling(source, tmp_path, 10)
    text = source.text("sglang/srt/managers/io_struct.py")
    body = text[text.index("class ProfileReq") :].split("\nclass ", 2)
    fields = next(part for part in body if "num_steps" in part)
    for key in (*how.asked, "profile_prefix"):
        assert f"    {key}: " in fields, key
    writes = [m for m in source.modules if "class SchedulerProfiler" in source.text(m) and "profiler_" in m]
    assert writes and any("stage=ForwardMode.DECODE" in source.text(module) for module in writes)
    assert how.ends and how.whole == "-DECODE" and how.flags == () and how.variables == {}
