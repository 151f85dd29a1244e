"""``eyas tune``: the whole way in the embedded engine, what is shown and written, and what is refused."""

from __future__ import annotations

import json

import pytest

QUICK = ("--concurrency", "1,2", "--task", "translation", "--num-prompts", 2, "--warmup", 0, "--finalists", 1)
FEW = ("--steps", "1,2,3", "--topk", "1", "--output-len", 24)


def test_the_embedded_engine(eyas, target, drafter, tmp_path):
    """On a drafter that knows nothing: whatever wins, everything is there, and is gone on with."""
    tune = ("tune", target, "--drafter", drafter, *QUICK, *FEW, "--out", tmp_path / "t")
    ran = eyas(*tune, "--rounds", 1)
    assert ran.code == 3, ran.err
    results = json.loads((tmp_path / "t" / "tune.json").read_text())
    grid = [one for one in results["predicted"] if one["concurrency"] == 2]
    assert sorted(one["shape"]["num_steps"] for one in grid if one["shape"]) == [1, 2, 3]
    assert all(one["seconds"] > 0 and 1 <= one["tokens"] <= 4 for one in grid)
    names = {row["name"] for row in results["measured"]}
    assert {"plain", "auto"} < names and 3 <= len(names) <= 4 and len(results["measured"]) == 2 * len(names)
    assert set(results["choice"]) == {"1", "2"} and results["provenance"]["packages"]["torch"]
    for words in ("1 rounds are too few", "Predicted speedup", "plain", "auto", "concurrency 2: ", str(tmp_path / "t")):
        assert words in ran.out
    assert max(map(len, ran.out.splitlines()[1:10])) <= 120
    before = (tmp_path / "t" / "journal.jsonl").read_text()
    ran = eyas(*tune, "--rounds", 2, "--resume", "--json")
    assert ran.code == 3 and ran.records[0]["rounds"] == 2
    after = (tmp_path / "t" / "journal.jsonl").read_text()
    assert after.startswith(before) and after.count('"round 1/') == after.count('"round 2/') == 2 * len(names)
    eyas(*tune, "--rounds", 2).failed(2, "is there already")
    eyas(*tune, "--rounds", 2, "--resume", "--temperature", 1).failed(2, "was begun with another sampling")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("m", "--engine", "vllm", "--topk", "4"), "vLLM drafts chains only"),
        (("m", "--vary", "--a=b"), "they are for --engine"),
        (("m", "--", "--tp", "2"), "are for --engine vllm or sglang"),
        (("m", "--engine", "vllm", "--dtype", "float32"), "its own stand behind --"),
        (("m", "--engine", "vllm", "--drafter", "d", "--vary", "a=b"), "--vary takes '--flag=a,b'"),
        (("m", "--engine", "vllm", "--drafter", "untrained"), "needs a drafter of files"),
        (("m", "--rounds", "0"), "--rounds must be at least 1"),
        (("m", "--finalists", "0"), "--finalists must be at least 1"),
        (("m", "--speculation", "auto"), "is what is found out"),
        (("m", "--drafter", "d", "--concurrency", "0"), "whole numbers above 0"),
        (("m", "--drafter", "d", "--resume"), "name it with --out"),
        (("./nothing",), "no drafter comes with Eyas for ./nothing: name one with --drafter"),
        (("m", "--drafter", "d", "--topk", "4", "--draft-tokens", "1"), "leave no draft shape"),
    ],
)
def test_bad_usage(eyas, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    eyas("tune", *flags).failed(2, words)
    assert not list(tmp_path.iterdir())
