"""``eyas check D``: what a checkpoint is, in a table or as JSON."""

from __future__ import annotations

import re

import pytest


@pytest.mark.parametrize("width", ["60", "80", "120"])
def test_check_fits(eyas, drafter, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    lines = eyas("check", drafter).out.splitlines()
    assert max(map(len, lines)) <= min(int(width), 100)


def test_check_says_what_it_is(eyas, drafter):
    ran = eyas("check", drafter)
    assert ran.code == 0 and ran.err == ""
    said = " ".join(ran.out.split())
    for words in (
        "SGLang, SpecForge (architecture LlamaForCausalLMEagle3; config key eagle_config)",
        "1 decoder layer",
        "hidden 32, the target's 32",
        "8 heads of 4, 2 for keys and values",
        "the target's 160 tokens",
        "entry ids 1, 2, 4 = output ids 0, 1, 3",
        "loads in Eyas yes",
    ):
        assert words in said
    assert not re.search("odd|problems", said)


def test_check_as_json(eyas, drafter):
    (found,) = eyas("check", drafter, "--json").records
    assert found["loads"] and found["dialect"] == "sglang" and found["problems"] == []
    assert found["layer_ids"]["entry"] == [1, 2, 4] and found["layer_ids"]["output"] == [0, 1, 3]
    assert found["config"]["hidden_size"] == 32 and found["nbytes"] == 4 * found["parameters"]


def test_check_of_a_whole_model(eyas, target):
    ran = eyas("check", target)
    assert ran.code == 1
    assert "no EAGLE-3 architecture name" in " ".join(ran.out.split()) and "loads in Eyas  no" in ran.out
    (found,) = eyas("check", target, "--json").records
    assert not found["loads"] and found["problems"] and found["odd"]


def test_check_of_nothing(eyas, tmp_path):
    eyas("check", tmp_path / "none").failed(1, "no such file")
    eyas("check", tmp_path, "--json").failed(1, "config.json: missing")
