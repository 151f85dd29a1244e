"""Whole benchmarks: against servers, through their death, and in the engine of this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import made
from bench.servers import Server, said, serving
from cli import tiny
from engine.harness import target_of
from server.live import Live, model
from training.taught import PROMPTS, taught

from eyas.bench import pairing
from eyas.bench.agreement import agreement
from eyas.bench.benchmark import Benchmark
from eyas.bench.client import Endpoint
from eyas.bench.facts import Facts
from eyas.bench.journal import Journal
from eyas.bench.pairing import Plan, Progress
from eyas.bench.passes import BenchError, Level, Pass
from eyas.bench.sides import Before, Embedded, EndpointSide, EngineSide, Unlike, hashed
from eyas.bench.workload import Prompt, Workload, builtin
from eyas.core import DraftShape, SamplingParams, UsageError
from eyas.engine.llm import LLM

PARAMS = SamplingParams(max_tokens=8, seed=0)
ONE, TWO = Level("concurrency", 1), Level("concurrency", 2)
SETTINGS = {"model": "m"}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "PATIENCE", 1)


def two(without: Server, with_: Server, out: Path, *, resume: bool = False, **changes: Any) -> Benchmark:
    sides = {
        name: EndpointSide(name, Endpoint(server.url), PARAMS)
        for name, server in (("without", without), ("with", with_))
    }
    plan = replace(Plan((ONE, TWO), PARAMS, rounds=2, num_prompts=2, warmup=1), **changes)
    return Benchmark(sides, builtin(["chat", "code"]), plan, out, resume)


def run(benchmark: Benchmark, **how: Any) -> dict[str, Any]:
    return asyncio.run(benchmark.run(**how))


def test_two_servers(tmp_path):
    news: list[Any] = []
    with serving(Server()) as plain, serving(Server(burst=4)) as fast:
        fast.forgets = "/reset_prefix_cache"
        results = run(two(plain, fast, tmp_path / "r.json"), report=news.append)
    assert fast.forgotten == 2 + 8 and plain.forgotten == 0, "before each pass"
    cached = [note for note in results["notes"] if "prefix cache is not emptied" in note]
    assert len(cached) == 1 and cached[0].startswith("without speculation: ")
    assert json.loads((tmp_path / "r.json").read_text()) == json.loads(json.dumps(results))
    # 2 sides that say hello; of each: 2 levels with a warm-up, 2 rounds x 2 levels x 2 tasks, of 2 prompts
    assert len(plain.asked) == len(fast.asked) == 1 + 2 * 2 + 8 * 2
    assert [b.get("messages") for b in plain.asked[1:]] == [b.get("messages") for b in fast.asked[1:]]
    acceptance = results["rows"][0]["acceptance"]
    # as the server counts: 8 tokens, of which a step brings 4 behind the first 4
    assert acceptance["acceptance_length"] == 4 and acceptance["acceptance_rates"] == (1.0, 1.0, 1.0)
    assert acceptance["steps"] == 2 * 2 * 2 and acceptance["source"] == "vLLM Prometheus counters"
    assert results["agreement"]["same"] == results["agreement"]["answers"] == 16
    orders = [(r["round"], r["level"]["value"], r["task"], r["order"][0]) for r in results["rounds"]]
    assert orders == [
        (turn + 1, level, task, ("without", "with")[(turn + place) % 2])
        for turn in range(2)
        for place, (level, task) in enumerate([(1, "chat"), (1, "code"), (2, "chat"), (2, "code")])
    ]
    shares = [one.share for one in news if isinstance(one, Progress)]
    assert shares == pytest.approx([(n + 1) / 16 for n in range(16)])


def test_the_order_alternates_in_every_cell(tmp_path):
    with serving(Server(pause=0)) as plain, serving(Server(pause=0, burst=2)) as fast:
        results = run(two(plain, fast, tmp_path / "r.json", rounds=4, num_prompts=1, warmup=0))
    for task in ("chat", "code"):
        firsts = [r["order"][0] for r in results["rounds"] if r["task"] == task and r["level"]["value"] == 2]
        assert firsts[:2] == firsts[2:] and set(firsts) == {"without", "with"}


def test_a_server_that_dies_costs_the_pair_in_the_making(tmp_path):
    out = tmp_path / "r.json"
    with serving(Server()) as plain, serving(Server(burst=4, dies_at=1 + 4 + 2 + 2)) as fast:
        with pytest.raises(BenchError) as failed:
            run(two(plain, fast, out))
        for words in (
            "with speculation is gone",
            "Pairs of passes that are kept: 1.",
            f"with --resume and --out {out}",
        ):
            assert words in str(failed.value)
    lines = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
    broken = [line["pass"] for line in lines if line.get("complete") is False]
    assert len(broken) == 1 and [bool(a.get("error")) for a in broken[0]["answers"]] == [False, True]
    assert broken[0]["answers"][0]["text"], "what was answered is kept"
    assert not out.exists()
    with serving(Server()) as plain, serving(Server(burst=4)) as fast:
        with pytest.raises(UsageError, match="is there already"):
            run(two(plain, fast, out))
        results = run(two(plain, fast, out, resume=True))
        # hello, warm-up of both levels, 7 of 8 passes
        assert len(plain.asked) == len(fast.asked) == 1 + 4 + 7 * 2
    assert len(results["rounds"]) == 8 and results["interrupted_answers"] == 1
    with serving(Server()) as plain, serving(Server(burst=4)) as fast:
        again = run(two(plain, fast, out, resume=True))
        assert len(fast.asked) == 1, "nothing was left to do"
        assert again["rows"] == results["rows"]
        with pytest.raises(UsageError, match="begun with another num prompts"):
            run(two(plain, fast, out, resume=True, num_prompts=3))
        changed = replace(two(plain, fast, out, resume=True), workload=builtin(["code"]))
        with pytest.raises(UsageError, match="begun with another prompts"):
            run(changed)
    older = {"owned_by": "vllm", "root": "/models/m", "max_model_len": 2048}
    other = pytest.raises(UsageError, match=r"another context length without speculation \(4096, now 2048\)")
    with serving(Server(card=older)) as plain, serving(Server(burst=4, card=older)) as fast, other:
        run(two(plain, fast, out, resume=True))


def test_a_server_that_is_gone_between_two_passes(tmp_path):
    with serving(Server()) as plain, serving(Server()) as fast:
        benchmark = two(plain, fast, tmp_path / "r.json")

        def end(news: Any) -> None:
            if isinstance(news, Progress):
                plain.uvicorn.should_exit = plain.uvicorn.force_exit = True
                fast.uvicorn.should_exit = fast.uvicorn.force_exit = True

        with pytest.raises(BenchError, match=r"(is gone|cannot be reached).*Pairs of passes that are kept"):
            run(benchmark, report=end)


def test_some_requests_fail_and_are_counted(tmp_path):
    with serving(Server()) as plain, serving(Server(burst=4)) as fast:
        benchmark = two(plain, fast, tmp_path / "r.json", warmup=0)

        def fail(news: Any) -> None:
            if isinstance(news, Progress) and news.share < 0.1:
                plain.faults.append(500)

        results = run(benchmark, report=fail)
    assert sum(row["without"]["failed"] for row in results["rows"] if row["task"] == "all") == 1
    assert results["agreement"]["answers"] == 15
    assert any("a request failed: HTTP 500: as told" in note for note in results["notes"])


def test_all_requests_fail(tmp_path):
    with serving(Server()) as plain, serving(Server()) as fast:
        benchmark = two(plain, fast, tmp_path / "r.json", warmup=0)

        def fail(news: Any) -> None:
            if isinstance(news, Progress):
                fast.faults = [503] * 100

        with pytest.raises(BenchError, match=r"answers nothing any more \(HTTP 503: as told\)"):
            run(benchmark, report=fail)


@pytest.mark.parametrize(
    ("without", "with_", "words"),
    [
        (Server(burst=2), Server(burst=2), "speculates itself"),
        (
            Server(),
            Server(burst=2, card={"owned_by": "vllm", "root": "/models/other", "max_model_len": 4096}),
            "different models",
        ),
        (
            Server(),
            Server(burst=2, card={"owned_by": "vllm", "root": "/models/m", "max_model_len": 99}),
            "different limits",
        ),
    ],
)
def test_nothing_is_measured_of_what_cannot_be_judged(tmp_path, without, with_, words):
    with serving(without) as plain, serving(with_) as fast, pytest.raises(BenchError, match=words):
        run(two(plain, fast, tmp_path / "r.json"))
    assert len(fast.asked) == 1 and not list(tmp_path.iterdir())


def test_answers_that_differ_from_the_first_word_on_are_not_judged(tmp_path):
    with serving(Server()) as plain, serving(Server(burst=4, other_text="garbage ")) as fast:
        results = run(two(plain, fast, tmp_path / "r.json", warmup=0))
    assert results["verdict"]["outcome"] == "not judged" and results["verdict"]["exit_code"] == 1
    assert "16 of 16 greedy answers differ from their first words on" in results["verdict"]["sentence"]


def test_servers_that_say_little(tmp_path):
    """Neither streams nor metrics: the verdict stands on whole answers, acceptance is unknown."""
    blind = {"streams": False, "metrics": False, "card": {}}
    with serving(Server(**blind)) as plain, serving(Server(**blind)) as fast:
        results = run(two(plain, fast, tmp_path / "r.json", warmup=0))
    row = results["rows"][0]
    assert row["acceptance"] is None and row["with"]["first"] is None and row["speedup"] > 0
    assert any("does not stream" in note for note in results["notes"])
    assert any("acceptance is unknown: the server tells nothing" in note for note in results["notes"])


def test_eyas_says_it_in_its_usage(tmp_path):
    usage = {"speculative": {"steps": 2, "drafted": 10, "accepted": 5, "acceptance_length": 3.5}}
    with serving(Server()) as plain, serving(Server(metrics=False, says=usage, card={"owned_by": "eyas"})) as fast:
        plain.card = {"owned_by": "eyas"}
        plain.metrics = False
        results = run(two(plain, fast, tmp_path / "r.json", warmup=0))
    assert results["rows"][0]["acceptance"]["acceptance_length"] == 3.5
    assert results["sides"]["with"]["speculates"] is True, "its first answer said so"


def test_prompts_over_the_context_are_left_out(tmp_path):
    card = {"owned_by": "vllm", "root": "/models/m", "max_model_len": 200}
    with serving(Server(card=card)) as plain, serving(Server(card=card, burst=2)) as fast:
        long = Prompt("chat/long", "chat", [{"role": "user", "content": "word " * 195}])
        short = Prompt("chat/short", "chat", [{"role": "user", "content": "word " * 60}])
        benchmark = replace(two(plain, fast, tmp_path / "r.json"), workload=Workload({"chat": (long, short)}, "mine"))
        results = run(benchmark)
    assert "prompts left out of mine: 1 too long for a context of 200 tokens (chat/long)" in results["notes"]
    assert all("word " * 195 not in str(body) for body in fast.asked[3:])


def test_a_server_that_is_gone_has_not_refused_its_prompts():
    side = EndpointSide("without", Endpoint("http://127.0.0.1:9", model="m"), PARAMS)
    side.facts = Facts("http://127.0.0.1:9", context_length=10)
    with pytest.raises(BenchError, match="is gone"):
        asyncio.run(side.room(builtin(["chat"]).prompts["chat"][0]))


def test_where_answers_part_is_looked_into(tmp_path):
    with serving(Server()) as plain, serving(Server(burst=4)) as fast:
        results = run(two(plain, fast, tmp_path / "r.json", warmup=0))
        pairs = list(
            Journal(
                tmp_path / "r.jsonl",
                json.loads((tmp_path / "r.jsonl").read_text().splitlines()[0])["settings"],
                resume=True,
            ).pairs.values()
        )
        side = EndpointSide("without", Endpoint(plain.url, model="m"), PARAMS)
        mine = pairs[0].without.answers[0]
        prompt = builtin(["chat"]).prompts["chat"][0]
        words = said(prompt.text, 8)
        assert mine.text == "".join(words)
        other = replace(mine, text="".join([*words[:5], "emu ", *words[6:]]))
        unlike = asyncio.run(side.explain(prompt, mine, other))
    assert unlike.gap == pytest.approx(0.25) and unlike.near_tie is None
    assert results["agreement"]["itself"]["answers"] == results["agreement"]["itself"]["same"] > 0


def test_a_gap_of_another_answer_is_no_explanation():
    side, prompt = EndpointSide("without", Endpoint("http://127.0.0.1:9"), PARAMS), Prompt("p", "p", [])

    async def choices(prompt: Prompt, sampling: SamplingParams) -> list[tuple[str, float]]:
        return [("owl ", 0.5), ("kite ", 0.25)]

    side.endpoint.choices = choices
    mine = made.answer("p", 0.1, text="owl kite")
    assert asyncio.run(side.explain(prompt, mine, replace(mine, text="owl crow"))).gap == 0.25
    mine = replace(mine, text="emu kite")
    assert asyncio.run(side.explain(prompt, mine, replace(mine, text="emu crow"))).gap is None


def changed(pairs: list[Any], text: str) -> list[Any]:
    """With this answer to everything on the side with speculation."""
    sides = [replace(p.with_, answers=tuple(replace(a, text=text) for a in p.with_.answers)) for p in pairs]
    return [replace(pair, with_=side) for pair, side in zip(pairs, sides, strict=True)]


def test_answers_that_part_late_are_strange_where_a_side_agrees_with_itself():
    pairs = changed(made.pairs([ONE], [1.5], rounds=8), made.TEXT[:30] + "?")
    found = agreement(pairs)
    assert (found.answers, found.same, found.at_once, found.itself) == (32, 0, 0, (28, 28)) and found.strange
    verdict = made.results(pairs)["verdict"]
    assert (verdict["outcome"], verdict["exit_code"]) == ("not judged", 1)
    assert verdict["sentence"].startswith("Only 0 of 32 greedy answers are the same on both sides")
    assert not agreement(pairs[:4]).strange, "16 are too few to say so"


def test_an_empty_answer_parts_at_once():
    assert agreement(changed(made.pairs([ONE], [1.5], rounds=1), "")).at_once == 4


def test_a_difference_that_is_a_bug_is_not_judged():
    pairs = made.pairs([ONE], [1.5])
    found = replace(agreement(pairs), explained=(Unlike(0.1, True), Unlike(3.0, False)))
    results = made.benchmark(pairs)._results(made.facts(), pairs, found, 0)
    assert (results["verdict"]["outcome"], results["verdict"]["exit_code"]) == ("not judged", 1)
    assert results["verdict"]["sentence"].startswith("1 differences between greedy answers are no near-ties")


def test_a_drafter_is_known_by_its_files(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    one = hashed(str(tmp_path))
    file.write_bytes(b"two")
    assert one.startswith(f"{tmp_path} (SHA-256 ") and hashed(str(tmp_path)) != one != hashed(str(file))
    assert hashed("untrained") == "untrained"


@pytest.mark.parametrize(("device", "known"), [("cpu", True), ("cuda", False)])
def test_parts_of_a_step_are_those_of_a_cpu(device, known):
    llm = SimpleNamespace(target=SimpleNamespace(device=torch.device(device)), drafter=None)
    times = SimpleNamespace(propose=1.0, verify=2.0, rest=3.0, steps=4)
    side = EngineSide("with", SimpleNamespace(llm=llm, times=times), PARAMS)
    assert bool(asyncio.run(side.after(None, [])).spent) is known


def test_how_much_is_asked_by_default():
    plan = Plan((ONE,), PARAMS)
    levels = [*(Level("concurrency", n) for n in (1, 64)), *(Level("request rate", n) for n in (0.1, 8.0))]
    assert [plan.count(level) for level in levels] == [5, 320, 16, 240]


def test_a_client_that_is_the_limit_says_so():
    before = Before("", forgot=True, cpu=0.0, clock=0.0)
    assert before.notes(0.5) == () and "it may be the limit" in before.notes(0.9)[0]


def test_agreement():
    pairs = made.pairs([ONE], [1.5], rounds=2)
    changed = replace(pairs[0].with_.answers[0], text=made.TEXT[:20] + "?")
    broken = replace(pairs[0].with_.answers[1], error="HTTP 500")
    pairs[0] = replace(pairs[0], with_=replace(pairs[0].with_, answers=(changed, broken, *pairs[0].with_.answers[2:])))
    found = agreement(pairs)
    assert (found.answers, found.same, found.at_once) == (7, 6, 0) and found.shares == (20 / 21,)
    assert found.itself == (4, 4) and not found.strange
    text = found.sentence(greedy=True)
    assert text.startswith("6 of 7 answers (85.7%) are the same on both sides; without speculation, 100.0%")


def test_a_journal_survives_being_cut_off(tmp_path):
    path = tmp_path / "j.jsonl"
    journal = Journal(path, SETTINGS, resume=False)
    pair = made.pairs([ONE], [1.5], rounds=1)[0]
    for one in (pair.without, pair.with_, replace(pair.without, turn=1)):
        if one is not pair.with_:
            journal.begin()
        journal.add(one)
    path.write_text(path.read_text() + '{"pass": {"turn": 1, "lev')
    again = Journal(path, SETTINGS, resume=True)
    assert list(again.pairs) == [(0, ONE, "chat")] and again.pairs[(0, ONE, "chat")] == pair
    again.begin()
    again.add(replace(pair.with_, turn=1))
    assert len(again.pairs) == 1, "the other half was measured long before: no pair"
    assert len(Journal(path, SETTINGS, resume=True).pairs) == 1
    with pytest.raises(UsageError, match=r"another model \('m', now 'other'\)"):
        Journal(path, {"model": "other"}, resume=True)
    path.write_text(path.read_text() + '{"pair": 9}')
    again = Journal(path, SETTINGS, resume=True)
    again.begin()
    assert Journal(path, SETTINGS, resume=True).path.read_text().endswith('\n{"pair": 1}\n'), "on a line of its own"
    path.write_text("{broken\n" + path.read_text())
    with pytest.raises(BenchError, match="line 1 is damaged"):
        Journal(path, SETTINGS, resume=True)
    path.write_text("[1]\n")
    with pytest.raises(BenchError, match="no journal of this version"):
        Journal(path, SETTINGS, resume=True)
    with pytest.raises(UsageError, match="nothing to resume"):
        Journal(tmp_path / "none.jsonl", SETTINGS, resume=True)


def test_a_pass_is_the_same_when_read_back():
    for one in made.pairs([Level("request rate", 0.5)], [1.5], rounds=1, notes=("x",), spent={"steps": 3.0})[
        0
    ].sides.values():
        assert Pass.from_record(json.loads(json.dumps(one.as_record()))) == one


# The engine in this process


@pytest.fixture(scope="module")
def questions() -> Sequence[Prompt]:
    texts = [tiny.tokenizer().decode(ids) for ids in PROMPTS[:3]]
    return [Prompt(f"birds/{n}", "birds", [{"role": "user", "content": text}]) for n, text in enumerate(texts)]


def test_the_embedded_engine(tmp_path, questions):
    target, words = target_of("llama"), tiny.tokenizer(template=None)
    llm = LLM(target, words, drafter=taught(), speculation="fixed", context_length=128, name="tiny")
    sampling = SamplingParams(max_tokens=24, seed=0, ignore_eos=True)
    both = Embedded(llm)
    sides = {name: EngineSide(name, both, sampling) for name in ("without", "with")}
    workload = Workload({"birds": tuple(questions)}, "mine")
    results = run(
        Benchmark(sides, workload, Plan((ONE, TWO), sampling, rounds=2, warmup=0, num_prompts=3), tmp_path / "r.json")
    )
    assert results["verdict"]["outcome"] == "not shown" and "2 rounds are too few" in results["verdict"]["sentence"]
    assert results["agreement"]["same"] == results["agreement"]["answers"] == 12, "fp32: the same tokens"
    row = results["rows"][0]
    assert row["with"]["tokens"] == row["without"]["tokens"] == 2 * 3 * 24
    alone = LLM(target, words, drafter=taught(), speculation="fixed", context_length=128)
    stats = [alone.generate(q.text, sampling).stats for q in questions]
    assert row["acceptance"]["steps"] == 2 * sum(s.steps for s in stats)
    assert row["acceptance"]["emitted"] == 2 * sum(s.emitted for s in stats)
    assert row["acceptance"]["acceptance_length"] > 1.2, "nothing was accepted: nothing was compared"
    step = row["step"]
    assert step["measured"] and step["parts"]["without"]["draft"] < step["parts"]["with"]["draft"]
    assert step["with"] == pytest.approx(sum(step["parts"]["with"].values()))
    drafted = [drafted for _, drafted in results["samples"][0]["pieces"]]
    assert True in drafted and False in drafted
    assert not results["rows"][0]["without"]["failed"] and row["with"]["between"]["p50"] > 0
    assert both.serving is None, "its thread has ended"


def test_servers_of_eyas(tmp_path, questions):
    """What is reported is what the server counted, from its first request on."""
    sampling = SamplingParams(max_tokens=24, seed=0, ignore_eos=True)
    plain = Live(lambda: model(drafter=None, speculation="off", shape=None))
    fast = Live(lambda: model(drafter=taught(), shape=DraftShape(3, 1, 4)))
    try:
        sides = {
            name: EndpointSide(name, Endpoint(server.url, completions=True), sampling)
            for name, server in (("without", plain), ("with", fast))
        }
        workload = Workload({"birds": tuple(questions)}, "mine")
        plan = Plan((ONE, TWO), sampling, rounds=2, warmup=0, num_prompts=3)
        results = run(Benchmark(sides, workload, plan, tmp_path / "r.json"))
        counted = fast.service.metrics.acceptance
    finally:
        plain.close()
        fast.close()
    said = results["sides"]
    assert [said[name]["engine"] for name in said] == ["Eyas", "Eyas"]
    assert [said[name]["speculates"] for name in said] == [False, True]
    assert said["with"]["shape"] == vars(DraftShape(3, 1, 4)) and said["with"]["max_running_requests"] == 4
    assert results["agreement"]["same"] == results["agreement"]["answers"] == 12, "fp32: the same text"
    rows = results["rows"]
    steps = [row["acceptance"]["steps"] for row in rows]
    hello = counted.steps - sum(steps)
    assert rows[0]["acceptance"]["source"] == "Eyas's counters" and 0 < hello <= 7
    assert 0 <= counted.emitted - sum(row["acceptance"]["emitted"] for row in rows) <= 8
    assert rows[0]["acceptance"]["acceptance_length"] > 1.1, "nothing was accepted: nothing was compared"
    assert all(len(row["acceptance"]["acceptance_rates"]) == 3 for row in rows)
    assert rows[0]["with"]["tokens"] == rows[0]["without"]["tokens"] == 2 * 3 * 24
