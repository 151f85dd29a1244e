"""Engines that the judge starts itself: a real server of Eyas stands where vLLM would, or a quick one that is acted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from bench import served
from bridges.launching import engine
from model_files import tiny_llama, tiny_tokenizer

from eyas.bench import launched, pairing
from eyas.bench.benchmark import Benchmark
from eyas.bench.grid import Contender, Variant, variants
from eyas.bench.journal import Memo
from eyas.bench.launched import both, plainly, planned
from eyas.bench.pairing import Plan
from eyas.bench.passes import BenchError, Level
from eyas.bench.subjects import Relaunched
from eyas.bench.tune import Search, tune
from eyas.bench.workload import Prompt, Workload
from eyas.bridges import holders
from eyas.bridges.launch import Asked
from eyas.core import DraftShape, SamplingParams, UsageError
from eyas.drafter import storage
from eyas.drafter.model import untrained
from eyas.target.smollm2 import cache_folder

LEVELS = (Level("concurrency", 1), Level("concurrency", 2))
PARAMS = SamplingParams(max_tokens=16, seed=0, ignore_eos=True)
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "vocab_size": 96}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 8}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, drafter = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    tiny_llama(**SIZES, **HEADS).save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    storage.save(untrained(32, 8, 96, seed=7, max_position_embeddings=256), drafter, "vllm")
    return target, drafter


@pytest.fixture
def asked(pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An engine called vLLM; at the end nothing of it runs."""
    place = engine(tmp_path / "vllm", "vllm")
    (place / "vllm/entrypoints/cli/main.py").write_text(Path(served.__file__).read_text())
    tests = Path(__file__).parents[1]
    kernels = cache_folder() / "kernels"  # compiled once, by whichever test came first
    kernels.mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(kernels)
    for name, value in {"PYTHONPATH": f"{place}:{tests}", "EYAS_CACHE": tmp_path / "cache", "ACT": "acted"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("STARTS", str(tmp_path / "starts"))
    monkeypatch.setattr(holders, "_SMI", "no-nvidia-smi")
    monkeypatch.setattr(pairing, "PATIENCE", 1)

    def ask(*arguments: str, **more: Any) -> Asked:
        return Asked("vllm", str(pair[0]), pair[1], arguments, check=False, **more)

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield ask
    assert not [child for child in psutil.Process().children(recursive=True) if child.pid not in before]


def starts(tmp_path: Path) -> list[int]:
    """What was drafted by each server, in the order of their starts."""
    return [int(line.split()[0]) for line in (tmp_path / "starts").read_text().splitlines()]


def benchmark(asked: Asked, out: Path, *, side_by_side: bool, rounds: int = 2, resume: bool = False) -> Benchmark:
    sides, blocks = both(asked, DraftShape(3, 1, 4), PARAMS, side_by_side=side_by_side, running=2, log=out)
    assert blocks is not side_by_side
    prompts = tuple(Prompt(f"birds/{n}", "birds", [{"role": "user", "content": f"w{n}"}]) for n in range(4))
    plan = Plan(LEVELS, PARAMS, rounds=rounds, num_prompts=2, warmup=0, blocks=blocks)
    return Benchmark(sides, Workload({"birds": prompts}, "mine"), plan, out, resume)


def test_a_real_server_both_ways(asked, tmp_path, monkeypatch):
    """Side by side: two processes with the same weights, and the acceptance that one of them counted."""
    monkeypatch.setenv("ACT", "eyas")
    made = benchmark(asked(), tmp_path / "r.json", side_by_side=True)
    for side in made.sides.values():
        side.completions = True  # the tiny target has no template for chats
    counted: list[str] = []
    close = launched.LaunchedSide.close

    async def read_first(side: launched.LaunchedSide) -> None:
        if side.name == "with" and side.server is not None and side.server.ready:
            counted.append(await side.endpoint.page("/metrics") or "")
        await close(side)

    monkeypatch.setattr(launched.LaunchedSide, "close", read_first)
    results = asyncio.run(made.run())
    assert [results["sides"][name]["engine"] for name in ("without", "with")] == ["Eyas", "Eyas"]
    assert [results["sides"][name]["speculates"] for name in ("without", "with")] == [False, True]
    assert results["sides"]["with"]["shape"] == vars(DraftShape(3, 1, 4))
    assert results["agreement"]["same"] == results["agreement"]["answers"] == 8, "fp32: the same text"
    said = next(line for line in counted[-1].splitlines() if line.startswith("eyas:spec_decode_num_drafts_total"))
    steps = sum(row["acceptance"]["steps"] for row in results["rows"])
    assert steps > 0 and 0 < float(said.split()[1]) - steps <= 8, "all but those of its first answer"
    assert not any("one side ran at a time" in note for note in results["notes"])
    assert (tmp_path / "r.with.log").read_text() and (tmp_path / "r.without.log").read_text()


def test_one_at_a_time(asked, tmp_path):
    """Each round in launches of its own, of which the sides take turns in being first."""
    results = asyncio.run(benchmark(asked(), tmp_path / "r.json", side_by_side=False).run())
    # to see what they are, then without and with, then with and without
    assert starts(tmp_path) == [0, 3, 0, 3, 3, 0]
    assert [r["order"][0] for r in results["rounds"]] == ["without", "without", "with", "with"]
    assert results["rows"][0]["acceptance"]["acceptance_length"] == 4
    assert any("one side ran at a time, in blocks" in note for note in results["notes"])
    assert results["settings"]["blocks"] is True


@pytest.mark.thorough
def test_one_that_dies_and_is_gone_on_with(asked, tmp_path, monkeypatch):
    monkeypatch.setenv("DIES", "with@4")
    with pytest.raises(BenchError, match=r"(?s)with speculation is gone \(.*exit code 7.*--resume"):
        asyncio.run(benchmark(asked(), tmp_path / "r.json", side_by_side=False).run())
    monkeypatch.delenv("DIES")
    results = asyncio.run(benchmark(asked(), tmp_path / "r.json", side_by_side=False, resume=True).run())
    assert len(results["rounds"]) == 4 and results["rows"][0]["with"]["failed"] == 0


def test_one_that_does_not_start(asked, tmp_path):
    made = benchmark(asked("--refuse", "this"), tmp_path / "r.json", side_by_side=True)
    with pytest.raises(BenchError, match=r"does not start without speculation: .*ValueError: this is refused"):
        asyncio.run(made.run())
    assert not (tmp_path / "r.json").exists()


def test_interrupted_while_it_starts(asked, tmp_path, monkeypatch):
    async def give_up() -> None:
        side = benchmark(asked(), tmp_path / "r.json", side_by_side=True).sides["without"]
        try:
            await asyncio.wait_for(side.start(), 0.05)
        finally:
            await side.close()

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(give_up())


def test_relaunched_for_each_contender(asked, tmp_path):
    async def go() -> list[Any]:
        subject = Relaunched(asked(), PARAMS, 2, tmp_path / "engine.log")
        plain, drafts = Contender(), Contender(DraftShape(2, 1, 3), Variant(("--x", "1"), (("Y", "2"),)))
        launches = []
        try:
            for one, label in ((plain, "round 1"), (plain, "round 1"), (drafts, "round 1"), (drafts, "round 2")):
                side, launch = await subject.on(one, label, lambda what: None)
                launches.append((side.name, launch, list(side.plan.command)[-8:], side.plan.environment.get("Y")))
        finally:
            await subject.close()
        return launches

    found = asyncio.run(go())
    assert [launch for _, launch, _, _ in found] == [1, 1, 2, 3], "a round is a launch of its own"
    assert starts(tmp_path) == [0, 2, 2] and [y for *_, y in found] == [None, None, "2", "2"]
    assert "--x" in found[2][2] and "--x" not in found[0][2]


@pytest.mark.thorough
def test_a_whole_search(asked, pair, tmp_path, monkeypatch):
    """Servers whose steps all take as long, and whose drafts are always right: the longest is the best."""
    monkeypatch.setenv("PAUSE", "0.05")  # whatever else runs on this machine
    tried = tuple(variants(["--refuse=,this"], []))
    shapes = (DraftShape(1, 1, 2), DraftShape(3, 1, 4))
    search = Search(shapes, tried, Plan(LEVELS, PARAMS, rounds=1, num_prompts=2, warmup=0), keep=1)
    prompts = tuple(Prompt(f"birds/{n}", "birds", [{"role": "user", "content": f"w{n}"}]) for n in range(4))
    memo, news = Memo(tmp_path / "journal.jsonl", {}, resume=False), list[str]()
    subject = Relaunched(asked(), PARAMS, 2, tmp_path / "engine.log")
    found = asyncio.run(tune(subject, Workload({"birds": prompts}, "mine"), search, memo, news.append))
    told = {one["shape"] and one["shape"]["num_steps"]: one["tokens"] for one in found["predicted"]}
    assert told == {None: 1, 1: 2, 3: 4}
    assert {level: one["name"] for level, one in found["choice"].items()} == {1: "chain of 3", 2: "chain of 3"}
    (dropped,) = found["dropped"]
    assert dropped["name"] == "plain, --refuse this" and "ValueError: this is refused" in dropped["reason"]
    config = found["use"]["files"]["speculative-config.json"]
    assert config == {"method": "eagle3", "model": str(pair[1]), "num_speculative_tokens": 3}
    assert found["verdict"]["exit_code"] == 3 and "1 rounds are too few" in found["verdict"]["sentence"]
    assert starts(tmp_path)[:3] == [0, 1, 3], "the survey"
    assert any("left at most" in text for text in news) and any("starting vllm" in text for text in news)


# What is run


def test_the_same_but_for_speculation(asked, monkeypatch):
    given = asked("--max-model-len", "64", "--speculative-config", '{"draft_sample_method": "greedy"}')
    monkeypatch.setattr(launched, "free_port", lambda: 1234)
    with_, without = (planned(given, one, 1) for one in (Contender(DraftShape(2, 1, 3)), Contender()))
    place = with_.command.index("--speculative-config")
    assert json.loads(with_.command[place + 1])["num_speculative_tokens"] == 2
    assert json.loads(with_.command[place + 1])["draft_sample_method"] == "greedy"
    assert without.command == (*with_.command[:place], *with_.command[place + 2 :])
    assert without.command[-4:] == ("--host", "127.0.0.1", "--port", "1234") and without.address.port == 1234
    assert without.environment["VLLM_SERVER_DEV_MODE"] == "1"


def test_sglang(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(engine(tmp_path / "sglang", "sglang")))
    given = Asked("sglang", str(pair[0]), pair[1], ("--speculative-adaptive", "--page-size", "1"), check=False)
    plan = planned(given, Contender(DraftShape(5, 4, 8)), 8)
    joined = " ".join(plan.command)
    numbers = "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8"
    assert numbers in joined and "--max-running-requests 48" in joined and "--enable-metrics" in joined
    plain = " ".join(plainly(plan).command)
    assert "speculative" not in plain and "--page-size 1" in plain and "--max-running-requests 48" in plain
    assert str(pair[1]) not in plain, "nor its drafter's path"
    many = planned(given, Contender(), 64)
    assert "--max-running-requests 64" in " ".join(many.command)
    tried = planned(given, Contender(variant=Variant(("--max-running-requests", "7"))), 64)
    assert " ".join(tried.command).count("--max-running-requests") == 1, "what is tried is not overridden"


def test_refused(asked, tmp_path):
    for flag in ("--port", "--host"):
        with pytest.raises(UsageError, match=f"{flag} is chosen by the judge"):
            planned(asked(f"{flag}=1"), Contender(), 1)
        with pytest.raises(UsageError, match=f"{flag} is chosen by the judge"):
            planned(asked(), Contender(variant=Variant((flag, "1"))), 1)
    with pytest.raises(UsageError, match="vLLM drafts chains only"):
        planned(asked(), Contender(DraftShape(5, 4, 8)), 1)
    file = tmp_path / "vllm.yaml"
    file.write_text("speculative-config: {num_speculative_tokens: 2}")
    with pytest.raises(UsageError, match="--config: speculative-config in the file holds without speculation too"):
        planned(asked("--config", str(file)), Contender(), 1)
