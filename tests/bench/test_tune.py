"""Searches on engines that are made up, whose best is known; and what the real engines make of the files."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bridges.wheels import engine as wheel

from eyas.bench import grid, tune
from eyas.bench.grid import Contender, StepTable, Variant
from eyas.bench.journal import Memo
from eyas.bench.pairing import Plan
from eyas.bench.passes import Answer, BenchError, Level, Pass
from eyas.bench.subjects import Surveyed
from eyas.bench.tune import Course, Search
from eyas.bench.workload import builtin
from eyas.bridges.metrics import Speculation
from eyas.core import DraftShape, SamplingParams, UsageError
from eyas.speculation.cost import AcceptanceRates, expected_tokens
from eyas.speculation.cost import grid as shapes_of

LEVELS = tuple(Level("concurrency", n) for n in (1, 8, 32))
CHAINS = tuple(shapes_of((1, 2, 3, 4, 5, 6, 8), (1,)))
TREES = tuple(shapes_of((1, 2, 3, 4, 5, 6, 8), (1, 4), (8, 16)))
GOOD, WEAK, USELESS = (AcceptanceRates.from_first([first] * 8, 4) for first in (0.8, 0.45, 0.02))


@dataclass
class Machine:
    """Steps take a fixed share, one for each token verified, and the drafter's passes; passes are exactly as fast as
    that says, but for ``noise``. ``boost``: of a variant; ``broken``: contenders that do not start.
    """

    rates: AcceptanceRates
    per_token: float = 0.01  # of a plain step of one sequence
    pass_: float = 0.08
    noise: float = 0.0
    boost: dict[str, float] = field(default_factory=dict)
    broken: tuple[str, ...] = ()
    launched: bool = False
    seed: int = 0
    asked: list[tuple[str, str, float]] = field(default_factory=list)
    breaks_at: int | None = None
    closed: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def seconds(self, shape: DraftShape | None, B: int) -> float:
        plain = 1 + self.per_token * B
        if shape is None:
            return plain
        nodes = shape.num_draft_tokens - 1
        return plain + self.per_token * B * nodes + self.pass_ * (1 + 0.02 * B) * shape.num_steps

    def speed(self, one: Contender, B: int) -> float:
        shape = DraftShape(3, 1, 4) if one.auto else one.shape
        tokens = expected_tokens(shape, self.rates) if shape else 1.0
        return self.boost.get(str(one.variant), 1.0) * B * tokens / self.seconds(shape, B)

    def best(self, shapes: Sequence[DraftShape], B: int) -> float:
        return max(self.speed(Contender(shape), B) for shape in (None, *shapes))

    async def survey(self, course: Course) -> Surveyed:
        shapes = course.search.shapes
        told = {(int(at.value), s): self.seconds(s, int(at.value)) for at in LEVELS for s in grid.surveyed(shapes)}
        told |= {(int(at.value), None): self.seconds(None, int(at.value)) for at in LEVELS}
        return Surveyed(dict.fromkeys(shapes, self.rates), StepTable(told))

    async def on(self, contender: Contender, label: str, report: Any) -> tuple[Any, object]:
        if str(contender) in self.broken:
            raise BenchError(f"{contender} does not start: as told.")
        return (self, contender, label), label if self.launched else None

    def uses(self, at: dict[int, Contender], one: Contender) -> grid.Use:
        return grid.for_eyas(at)

    async def close(self) -> None:
        self.closed += 1


async def passed(side: Any, prompts: Sequence[Any], turn: int, level: Level, task: str) -> Pass:
    machine, one, label = side
    if machine.breaks_at is not None and len(machine.asked) == machine.breaks_at:
        raise KeyboardInterrupt
    machine.asked.append((label, str(one), level.value))
    speed = machine.speed(one, int(level.value)) * math.exp(machine.random.normal(0, machine.noise))
    known = None if one.plain else Speculation("made", 100, 300, 150, 250, (80,), (100,))
    answers = (Answer("p", tokens=100, first=0.1, total=1.0),)
    return Pass(turn, level, task, "with", 100 / speed, answers, level.value, known)


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def warm(*_: Any) -> None: ...

    async def fine(*_: Any) -> None: ...

    async def all_fit(sides: Any, workload: Any, plan: Any) -> Any:
        return workload

    monkeypatch.setattr(tune, "one_pass", passed)
    monkeypatch.setattr(tune, "warm_up", warm)
    monkeypatch.setattr(tune, "check", fine)
    monkeypatch.setattr(tune, "fitting", all_fit)


def search(shapes: Sequence[DraftShape] = CHAINS, variants: Sequence[Variant] = (Variant(),), **more: Any) -> Search:
    plan = Plan(more.pop("levels", LEVELS), SamplingParams(seed=0), rounds=more.pop("rounds", 6), num_prompts=1)
    return Search(tuple(shapes), tuple(variants), plan, **more)


def run(machine: Machine, what: Search, folder: Path, *, resume: bool = False) -> dict[str, Any]:
    memo = Memo(folder / "journal.jsonl", {"x": 1}, resume=resume)
    return asyncio.run(tune.tune(machine, builtin(["chat"]), what, memo, lambda news: None))


# What is tried


def test_combinations_of_flags():
    found = grid.variants(["--attention-backend=triton,flashinfer", "--fuse=,on"], ["NCCL_ALGO=Ring,"])
    assert [(one.flags, one.variables) for one in found[:3]] == [
        (("--attention-backend", "triton"), (("NCCL_ALGO", "Ring"),)),
        (("--attention-backend", "triton"), ()),
        (("--attention-backend", "triton", "--fuse"), (("NCCL_ALGO", "Ring"),)),
    ]
    assert len(found) == 8 and str(found[2]) == "NCCL_ALGO=Ring --attention-backend triton --fuse"
    assert grid.variants([], []) == [Variant()]
    (one, other) = grid.variants([r'--compilation-config={"a":1\,"b":2},'], [])
    assert one.flags == ("--compilation-config", '{"a":1,"b":2}') and other.flags == ()
    for flags, variables in ((["attention=a"], []), (["--a"], []), ([], ["--a=b"]), ([], ["=b"])):
        with pytest.raises(UsageError, match="takes"):
            grid.variants(flags, variables)


@pytest.mark.parametrize("shapes", [CHAINS, TREES])
def test_steps_that_were_not_timed_follow_from_those_that_were(shapes):
    machine = Machine(GOOD)
    few = [None, *grid.surveyed(shapes)]
    assert len(few) <= 1 + 3 * len({shape.eagle_topk for shape in shapes})
    table = StepTable({(8, shape): machine.seconds(shape, 8) for shape in few})
    for shape in shapes:
        assert table.step(shape, 8, 1) == pytest.approx(machine.seconds(shape, 8), rel=1e-6)
    assert table.step(shapes[0], 4, 1) is None, "nothing was timed there"
    bent = StepTable({(8, None): 1.0, (8, CHAINS[0]): 2.0, (8, CHAINS[-1]): 2.1})
    assert bent.step(CHAINS[0], 8, 1) == 2.0 and 2.0 <= bent.step(CHAINS[3], 8, 1) <= 2.1


def test_rates_of_what_servers_tell():
    chain, tree = DraftShape(3, 1, 4), DraftShape(3, 4, 8)
    rates = grid.rates_of({DraftShape(1, 1, 2): (1.7, [0.7]), chain: (2.1, [0.7, 0.5, 0.4]), tree: (2.6, [])})
    assert [row[0] for row in rates.by_rank] == [0.7, 0.5, 0.4]
    assert expected_tokens(tree, rates) == pytest.approx(2.6), "as it was measured"
    assert expected_tokens(chain, rates) == pytest.approx(1 + 0.7 + 0.35 + 0.14)
    only_length = grid.rates_of({chain: (2.1, [])})
    assert expected_tokens(chain, only_length) == pytest.approx(2.1)


# The search


@pytest.mark.parametrize("rates", [GOOD, WEAK, USELESS], ids=["good", "weak", "useless"])
@pytest.mark.parametrize("shapes", [CHAINS, TREES], ids=["chains", "trees"])
def test_it_finds_the_best(rates, shapes, tmp_path):
    machine = Machine(rates, noise=0.01)
    found = run(machine, search(shapes, auto=True), tmp_path)
    for level in (1, 8, 32):
        one = found["choice"][level]
        shape = DraftShape(**one["shape"]) if one["shape"] else None
        assert machine.speed(Contender(shape, auto=one["auto"]), level) >= 0.97 * machine.best(shapes, level)
    assert found["apart"] < 0.02, "the predictor knows this machine"
    assert machine.closed == 1
    everything = len(shapes) * len(LEVELS) * 6
    assert len(machine.asked) < everything or shapes is CHAINS


def test_drafting_nothing_may_win(tmp_path):
    found = run(Machine(USELESS), search(), tmp_path)
    assert all(one["plain"] for one in found["choice"].values()) and found["verdict"]["exit_code"] == 4
    assert found["use"]["flags"] == ["--speculation", "off"]
    some = Machine(GOOD, per_token=0.12)
    found = run(some, search(), tmp_path / "some")
    assert not found["choice"][1]["plain"] and found["choice"][32]["plain"], "do not speculate at 32"
    assert found["verdict"]["exit_code"] == 4 and "pays at concurrency 1" in found["verdict"]["sentence"]
    found = run(Machine(GOOD, per_token=0.001), search(), tmp_path / "all")
    assert found["verdict"]["exit_code"] == 0
    found = run(Machine(GOOD, per_token=0.001), search(rounds=2), tmp_path / "few")
    assert found["verdict"]["exit_code"] == 3 and "2 rounds are too few" in found["verdict"]["sentence"]


def test_a_useless_choice_is_not_called_good(tmp_path):
    """All contenders are equally fast: the best of them must not be said to pay more than 5 times of 100."""
    wrong = 0
    for seed in range(60):
        machine = Machine(USELESS, noise=0.03, seed=seed)
        machine.speed = lambda one, B: 10.0  # type: ignore[method-assign]
        found = run(machine, search(levels=LEVELS[:1], keep=4), tmp_path / str(seed))
        wrong += found["verdict"]["exit_code"] in (0, 4)
    assert wrong <= 7  # of 60 at 5%: 3, and two standard errors


def test_flags_and_drafts_together(tmp_path):
    """The best flag is worth more than any draft, and only shows in combination."""
    tried = grid.variants(["--all-reduce=slow,fused,quantised", "--broken=,on"], [])
    boost = {"--all-reduce fused": 1.3, "--all-reduce quantised": 1.1}
    broken = tuple(f"plain, {one}" for one in map(str, tried) if "--broken" in one)
    machine = Machine(WEAK, noise=0.01, boost=boost, broken=broken, launched=True)
    found = run(machine, search(variants=tried), tmp_path)
    assert {tuple(one["flags"]) for one in found["choice"].values()} == {("--all-reduce", "fused")}
    plain = max(one["speedup"] for one in found["measured"] if one["plain"] and one["concurrency"] == 1)
    assert plain == pytest.approx(1.0), "speedups are against the fastest that drafts nothing"
    assert {one["name"] for one in found["dropped"]} == set(broken), "each is named once"
    assert all("does not start: as told" in one["reason"] for one in found["dropped"])
    assert not [name for _, name, _ in machine.asked if "--broken" in name], "nor is it tried with drafts"
    labels = [label for label, _, _ in machine.asked]
    counts = {label: labels.count(label) for label in dict.fromkeys(labels)}
    assert counts["rung 1"] > counts["rung 2"] > counts["round 1"] == counts["round 6"]


def test_one_draft_that_fails(tmp_path):
    """In the middle of everything: it alone is dropped, and what is left is judged."""
    whole = run(Machine(GOOD), search(), tmp_path / "whole")
    name = whole["choice"][1]["name"]
    found = run(Machine(GOOD, broken=(name,)), search(), tmp_path / "part")
    assert [one["name"] for one in found["dropped"]] == [name] and found["choice"][1]["name"] != name
    with pytest.raises(BenchError, match="plain does not start"):
        run(Machine(GOOD, broken=("plain",)), search(), tmp_path / "none")
    every = tuple(str(Contender(shape)) for shape in CHAINS)
    found = run(Machine(GOOD, broken=every), search(), tmp_path / "plain")
    assert found["verdict"]["exit_code"] == 1 and "No way of drafting ran" in found["verdict"]["sentence"]


def test_failures_of_the_side_without_drafts_show_nothing(tmp_path, monkeypatch):
    async def fails(side: Any, prompts: Any, turn: int, level: Level, task: str) -> Pass:
        done = await passed(side, prompts, turn, level, task)
        broken = Answer("p", error="HTTP 500")
        return replace(done, answers=(*done.answers, broken)) if side[1].plain else done

    monkeypatch.setattr(tune, "one_pass", fails)
    found = run(Machine(GOOD, per_token=0.001), search(), tmp_path)
    assert found["verdict"]["exit_code"] == 3 and "50% of the requests failed" in found["verdict"]["sentence"]


def test_no_engine_without_drafts_is_left(tmp_path, monkeypatch):
    """The fastest flag's, which the halving left, dies in the last round."""
    tried = grid.variants(["--fuse=,on"], [])
    machine = Machine(USELESS, boost={"--fuse": 2.0}, launched=True)

    async def dies(side: Any, *rest: Any) -> Pass:
        if side[2] == "round 6" and str(side[1]) == "plain, --fuse":
            raise BenchError("it died")
        return await passed(side, *rest)

    monkeypatch.setattr(tune, "one_pass", dies)
    with pytest.raises(BenchError, match=r"No engine without drafts ran all rounds\. plain, --fuse: it died"):
        run(machine, search(variants=tried, keep=1), tmp_path)


def test_prompts_that_do_not_fit_are_named_and_the_others_stay_the_same(tmp_path, monkeypatch):
    """Whoever is asked first says which fit: after a crash as well, though then it may be another one."""
    asked: list[list[str]] = []

    async def some(sides: Any, workload: Any, plan: Any) -> Any:
        kept = {task: prompts[:2] for task, prompts in workload.prompts.items()}
        return workload.only(kept, ["22 too long"])

    async def watched(side: Any, prompts: Any, *rest: Any) -> Pass:
        asked.append([prompt.key for prompt in prompts])
        return await passed(side, prompts, *rest)

    monkeypatch.setattr(tune, "fitting", some)
    monkeypatch.setattr(tune, "one_pass", watched)
    found = run(Machine(GOOD), search(rounds=1), tmp_path)
    assert found["notes"] == ["prompts left out of the built-in prompts: 22 too long"]
    monkeypatch.delattr(tune, "fitting")
    again = run(Machine(GOOD), search(rounds=2), tmp_path, resume=True)
    assert again["notes"] == found["notes"] and {key for keys in asked for key in keys} == {"chat/1", "chat/2"}


@pytest.mark.parametrize("launched", [False, True])
def test_resumed(tmp_path, launched):
    tried = grid.variants(["--x=a,b", "--y=,on"], [])
    whole = Machine(GOOD, launched=launched, broken=("plain, --x b --y",))
    expected = run(whole, search(variants=tried), tmp_path / "whole")
    first = replace(whole, breaks_at=40, asked=[], closed=0)
    with pytest.raises(KeyboardInterrupt):
        run(first, search(variants=tried), tmp_path / "part")
    assert first.closed == 1
    second = replace(whole, asked=[])
    found = run(second, search(variants=tried), tmp_path / "part", resume=True)
    assert [*first.asked, *second.asked] == whole.asked, "each pass once"
    assert json.dumps(found) == json.dumps(expected)
    with pytest.raises(UsageError, match="is there already"):
        run(second, search(), tmp_path / "part")


def test_the_order_of_a_round(tmp_path):
    """In one process all contenders follow one another at a level; a launch goes through all levels."""
    for launched in (False, True):
        machine = Machine(GOOD, launched=launched)
        run(machine, search(rounds=2), tmp_path / str(launched))
        first = [(name, level) for label, name, level in machine.asked if label == "round 1"]
        second = [name for label, name, _ in machine.asked if label == "round 2"]
        assert len({level for _, level in first[:2]}) == (2 if launched else 1)
        assert first[0][0] == "plain" and second[0] != "plain", "another one begins"


# What engines read


def test_ranges_between_levels():
    assert grid.ranges({1: 5, 8: 3, 32: 0}) == [(1, 2, 5), (3, 16, 3), (17, 32, 0)]
    assert grid.ranges({1: 3, 8: 3, 32: 1}) == [(1, 16, 3), (17, 32, 1)]
    assert grid.ranges({4: 2}) == [(1, 4, 2)] and grid.ranges({1: 1, 2: 2}) == [(1, 1, 1), (2, 2, 2)]


def chain(steps: int) -> DraftShape | None:
    return DraftShape(steps, 1, steps + 1) if steps else None


def test_vllm_reads_the_table():
    """By the function that vLLM 0.32's scheduler calls."""
    given = {"method": "eagle3", "model": "/d", "num_speculative_tokens": 3, "draft_sample_method": "greedy"}
    use = grid.for_vllm(given, {1: chain(5), 8: chain(3), 32: None}, chain(3), by_batch=True)
    config = json.loads(json.dumps(use.files["speculative-config.json"]))
    names: dict[str, Any] = {}
    exec(wheel("vllm-0.32.0").text("vllm/v1/spec_decode/dynamic/utils.py"), names)
    table, most = config["num_speculative_tokens_per_batch_size"], config["num_speculative_tokens"]
    counts = names["build_dynamic_sd_schedule_lookup"](table, 64, most)
    assert [counts[size] for size in (1, 8, 32, 64)] == [5, 3, 0, 0] and most == 5
    fields = wheel("vllm-0.32.0").text("vllm/config/speculative.py")
    assert all(f"    {name}:" in fields for name in config)
    older = grid.for_vllm(given | {"num_speculative_tokens": 9}, {1: chain(5), 32: None}, chain(3), by_batch=False)
    assert older.files["speculative-config.json"] == given, "as it was run, whatever else was asked for"
    assert grid.for_vllm(given, {1: None}, None, by_batch=True).flags == []


def test_sglang_reads_the_config(tmp_path):
    """By SGLang 0.5.23's own classes."""
    use = grid.for_sglang("/d", {1: chain(5), 8: chain(3), 32: None}, chain(3), adaptive=True)
    file = tmp_path / "adaptive.json"
    file.write_text(json.dumps(use.files["adaptive.json"]))
    tree = ast.parse(wheel("sglang-0.5.23").text("sglang/srt/speculative/adaptive_spec_params.py"))
    tree.body = [node for node in tree.body if not (isinstance(node, ast.ImportFrom) and "sglang" in str(node.module))]
    names: dict[str, Any] = {"log_info_on_rank0": lambda logger, text: None, "logging": logging}
    exec(compile(tree, "adaptive", "exec"), names)
    start = int(use.flags[use.flags.index("--speculative-num-steps") + 1])
    assert start in names["resolve_candidate_steps_from_config"](str(file))
    params = names["AdaptiveSpeculativeParams"](start, str(file))
    for _ in range(200):  # whatever is accepted, each batch keeps what was chosen for it
        for size in (1, 8, 32, 48):
            params.on_verify_complete([2] * size, size)
    assert [params.get_steps_for_batch(size) for size in (1, 8, 32, 48)] == [5, 3, 0, 0]
    spelled = wheel("sglang-0.5.23").text("sglang/srt/arg_groups/fields/spec.py")
    for flag in (part for part in use.flags if part.startswith("--")):
        assert f"    {flag.strip('-').replace('-', '_')}:" in spelled, flag
    tree_shape = DraftShape(5, 4, 8)
    use = grid.for_sglang("/d", {1: tree_shape, 32: chain(1)}, tree_shape, adaptive=True)
    assert not use.files and use.flags[-6:] == [
        *("--speculative-num-steps", "5", "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "8")
    ]
    assert grid.for_sglang("/d", {1: None}, None, adaptive=True).flags == []


def test_eyas_reads_its_flags():
    at = {1: Contender(chain(3)), 8: Contender(auto=True)}
    assert grid.for_eyas({1: at[8], 8: at[8]}).flags == ["--speculation", "auto"]
    assert grid.for_eyas(at).notes == [
        "at concurrency 1: --speculation fixed --speculative-num-steps 3 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 4",
        "at concurrency 8: --speculation auto",
    ]
