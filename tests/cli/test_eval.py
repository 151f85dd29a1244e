"""``eyas eval``: numbers that the engine's own runs confirm, in a table, as Markdown and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli import tiny
from training.taught import PROMPTS, taught

from eyas.core import SamplingParams
from eyas.drafter import storage
from eyas.engine.llm import load
from eyas.training.heldout import HELDOUT

QUESTIONS = [tiny.tokenizer().decode(ids) for ids in PROMPTS[:3]]  # whose answers the drafter was taught
QUICK = ("--max-tokens", 16)
SMALL = ("--steps", "1,3", "--topk", "1,2", "--draft-tokens", "4")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A target that reads a question as it is."""
    return tiny.save(tmp_path_factory.mktemp("plain"), template=None)


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("learned")
    storage.save(taught().model, folder)
    return folder


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "birds.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    return path


def test_what_is_measured_is_what_runs_come_to(eyas, plain, learned, file):
    ran = eyas("eval", plain, learned, "--prompts", file, *QUICK, "--temperature", "0,0.7", *SMALL, "--json")
    assert ran.code == 0, ran.err
    measured = [r for r in ran.records if r["kind"] == "measured"]
    assert [(r["task"], r["temperature"], r["prompts"], r["tokens"]) for r in measured] == [
        ("birds", 0.0, 3, 48),
        ("birds", 0.7, 3, 48),
    ]
    llm = load(plain, drafter=learned, speculation="fixed", context_length=128)
    for row in measured:
        how = SamplingParams(max_tokens=16, temperature=row["temperature"])
        answers = [llm.generate(text, how, seed=number) for number, text in enumerate(QUESTIONS)]
        # the engine by itself drafts less where an answer ends, so its last steps may be plain ones
        emitted = sum(a.stats.emitted for a in answers)
        steps = sum(a.stats.steps for a in answers)
        assert row["emitted"] - 3 <= emitted <= row["emitted"] == 45 and abs(row["steps"] - steps) <= 3
        low, high = row["interval"]
        assert 1 <= low <= row["acceptance_length"] == row["emitted"] / row["steps"] <= high
    assert measured[0]["acceptance_length"] > 1, "nothing was accepted: nothing was compared"


def test_the_simulation_agrees_with_real_runs(eyas, plain, learned, file):
    ran = eyas("eval", plain, learned, "--prompts", file, *QUICK, "--temperature", 0, *SMALL, "--check", 3, "--json")
    kinds = [r["kind"] for r in ran.records]
    assert kinds == ["measured", *3 * ["simulated"], *3 * ["checked"]]
    shapes = [tuple(r["shape"].values()) for r in ran.records if r["kind"] == "simulated"]
    assert shapes == [(1, 1, 2), (3, 1, 4), (3, 2, 4)]
    for row in ran.records[4:]:
        chain = row["shape"]["eagle_topk"] == 1
        assert row["simulated"] == pytest.approx(row["real"], rel=1e-9 if chain else 0.1)
        assert row["off"] == pytest.approx(row["simulated"] / row["real"] - 1)


def test_a_chain_of_the_grid_is_what_was_measured(eyas, plain, learned, file):
    """The same shape in both tables: the same number."""
    shape = ("--speculative-num-steps", 3)
    ran = eyas("eval", plain, learned, "--prompts", file, *QUICK, "--temperature", 0.5, *shape, *SMALL, "--json")
    measured, *simulated = ran.records
    assert measured["shape"] == simulated[1]["shape"]
    for name in ("steps", "emitted", "acceptance_length", "acceptance_rates"):
        assert measured[name] == simulated[1][name]


def test_built_in_prompts_by_task(eyas, target, drafter):
    ran = eyas("eval", target, drafter, "--limit", 2, "--max-tokens", 4, "--temperature", 0, "--no-simulate", "--json")
    assert [(r["task"], r["prompts"]) for r in ran.records] == [*((task, 2) for task in HELDOUT), ("all", 6)]
    ran = eyas("eval", target, drafter, "--task", "maths", "--limit", 1, "--max-tokens", 4, "--no-simulate", "--json")
    assert [(r["task"], r["temperature"]) for r in ran.records] == [("maths", 0.0), ("maths", 1.0)]


def test_built_in_prompts_are_many_and_distinct():
    every = [text for texts in HELDOUT.values() for text in texts]
    assert all(len(texts) >= 40 for texts in HELDOUT.values()) and set(HELDOUT) == {"chat", "code", "maths"}
    assert len({" ".join(text.lower().split()) for text in every}) == len(every)
    assert all(text == text.strip() and len(text) < 1000 for text in every)


def test_tables(eyas, plain, learned, file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    ran = eyas("eval", plain, learned, "--prompts", file, *QUICK, "--temperature", 0, *SMALL, "--check", 1)
    assert ran.code == 0 and max(map(len, ran.out.splitlines())) <= 100
    for words in ("birds", "95% interval", "chain", "top-k 2, 4 tokens", "simulated", "real", "%"):
        assert words in ran.out
    ran = eyas("eval", plain, learned, "--prompts", file, *QUICK, "--temperature", 0, *SMALL, "--markdown")
    lines = ran.out.splitlines()
    assert lines[0] == "### Acceptance, measured" and lines[3] == "| --- | ---: | ---: | ---: | ---: | ---: |"
    assert lines[4].startswith("| birds | 0 | 1.")
    assert lines[8] == "|  | 1 | 3 |" and lines[11].startswith("| top-k 2, 4 tokens | - | 1.")


def test_conversations_are_answered_at_their_last_question(eyas, target, drafter, tmp_path):
    chat = [("user", "w5"), ("assistant", "w6 w7"), ("user", "w8"), ("assistant", "never read")]
    lines = [
        {"messages": [{"role": role, "content": text} for role, text in chat]},
        {"messages": [{"role": role, "content": text} for role, text in chat[:3]]},
        {"conversations": [{"from": "gpt", "value": "out of order"}]},
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    ran = eyas("eval", target, drafter, "--prompts", path, *QUICK, "--temperature", 0, "--no-simulate", "--json")
    (row,) = ran.records
    assert row["prompts"] == 2 and "prompts left out: 1, conversations out of order" in ran.err
    same = eyas(
        "eval", target, drafter, "--prompts", path, *QUICK, "--temperature", 0, "--no-simulate", "--json", "--limit", 1
    )
    assert same.records[0]["steps"] * 2 == row["steps"]


# Bad input


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--temperature", "warm"), ("--temperature takes numbers", "'warm'")),
        (("--temperature", "-1"), ("temperature must be >= 0",)),
        (("--limit", 0), ("--limit must be at least 1",)),
        (("--check", 2, "--no-simulate"), ("--check", "--no-simulate")),
        (("--topk", "2", "--draft-tokens", "1"), ("leave no draft shape",)),
        (("--steps", "1,x"), ("--steps takes whole numbers", "'1,x'")),
        (("--steps", "100"), ("at most 64 steps",)),
        (("--task", "poems"), ("no built-in prompts for 'poems'", "chat, code, maths")),
        (("--json", "--markdown"), ("exclude each other",)),
        (("--max-tokens", 0), ("max_tokens must be >= 1",)),
    ],
)
def test_impossible_wishes(eyas, target, drafter, args, words):
    eyas("eval", target, drafter, *args).failed(2, *words)


def test_without_a_drafter(eyas, target):
    eyas("eval", target).failed(2, "no drafter comes with Eyas for", "name one")


def test_files_that_hold_no_prompts(eyas, target, drafter, tmp_path):
    eyas("eval", target, drafter, "--prompts", tmp_path / "none.jsonl").failed(1, "none.jsonl cannot be read")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "w5"}\n{"prompt": 7}\n')
    eyas("eval", target, drafter, "--prompts", broken).failed(1, "line 2", "expected")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    eyas("eval", target, drafter, "--prompts", empty).failed(2, "no prompts to measure on")
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "w5 " * 600}))
    eyas("eval", target, drafter, "--prompts", long).failed(2, "too long for the context of 512 tokens 1")


def test_a_target_that_breaks(eyas, drafter, tmp_path):
    broken = tiny.save(tmp_path / "poisoned", tiny.poisoned())
    path = tmp_path / "w40.jsonl"
    path.write_text(json.dumps({"prompt": "w40"}))
    eyas("eval", broken, drafter, "--prompts", path).failed(1, "NaN")
