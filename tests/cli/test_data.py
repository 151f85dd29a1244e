from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli import tiny
from training import talkers

from eyas.training.dataset import Dataset

PROMPTS = [{"prompt": f"w{n} w{n + 3}"} for n in range(3, 9)]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps(entry) + "\n" for entry in PROMPTS))
    return file


@pytest.fixture
def server() -> Iterator[talkers.Server]:
    with talkers.serving(tiny.tokenizer()) as running:
        running.repeats = "w5 w6 w7 w8"
        yield running


def test_data_in_process(eyas: Any, target: Path, prompts: Path, tmp_path: Path) -> None:
    command = ("data", target, "--out", tmp_path / "d", "--prompts", prompts, "--max-answer-tokens", 8)
    command = (*command, "--max-length", 64, "--context-length", 128)
    ran = eyas(*command, "--json")
    assert ran.code == 0, ran.err
    (manifest,) = ran.records
    assert manifest["rows"] == 6 and manifest["complete"] and manifest["sources"] == {"jsonl": 6}
    assert manifest["sampling"]["max_answer_tokens"] == 8
    again = eyas(*command)
    assert again.code == 0 and "6 with" in again.out
    eyas(*command, "--seed", 1).failed(2, "begun with seed 0, and now it is 1")


def test_data_through_a_server(eyas: Any, target: Path, prompts: Path, tmp_path: Path, server: talkers.Server) -> None:
    ran = eyas("data", target, "--out", tmp_path / "d", "--prompts", prompts, "--endpoint", server.url)
    assert ran.code == 0, ran.err
    found = Dataset.open(tmp_path / "d")
    assert len(found) == 6
    here = tiny.tokenizer()
    assert {here.decode(row.ids[row.mask]) for row in found} == {"w5 w6 w7 w8 <end>"}


def test_show_tells_whose_tokens_they_are(
    eyas: Any, target: Path, prompts: Path, tmp_path: Path, server: talkers.Server
) -> None:
    eyas("data", target, "-o", tmp_path / "d", "--prompts", prompts, "--endpoint", server.url)
    ran = eyas("data", target, "-o", tmp_path / "d", "--show", 2)
    assert ran.code == 0, ran.err
    assert len(re.findall(r"^user w\d+ w\d+ assistant\u27e6w5 w6 w7 w8 <end>\u27e7$", ran.out, re.MULTILINE)) == 2
    assert "6 with" in ran.out and "distinct" in ran.out
    *rows, manifest = eyas("data", target, "-o", tmp_path / "d", "--show", 2, "--json").records
    assert [[piece["loss"] for piece in row["pieces"]] for row in rows] == [[False, True]] * 2
    assert manifest["rows"] == 6 and manifest["diversity"]["different_tokens"] == 5

    other = tiny.save(tmp_path / "other", template=tiny.TEMPLATE + " ")
    eyas("data", other, "-o", tmp_path / "d", "--show", 2).failed(1, "another chat template")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "m"), "--model names a model"),
        (("--prompts", "p", "--kind", "code"), "exclude --prompts"),
        (("--kind", "magic"), "no kind of prompt 'magic'"),
        (("--temperatures", "hot"), "--temperatures takes numbers"),
        (("--temperatures", "-1"), "temperature must be >= 0"),
        (("--chat-template-kwargs", "[1]"), "takes a JSON object"),
        (("--conversations", 0), "at least 1"),
        (("--keep-answers",), "only where a file has some"),
        (("--show", -1), "--show takes"),
        (("--endpoint", "ftp://x"), "--endpoint is an address"),
        (("--topics", "none.txt"), "cannot be read"),
    ],
)
def test_flags_that_make_no_sense(eyas: Any, target: Path, tmp_path: Path, flags: tuple, words: str) -> None:
    eyas("data", target, "--out", tmp_path / "d", *flags).failed(2, words)
    assert not (tmp_path / "d").exists()


def test_what_goes_wrong_is_one_line(eyas: Any, target: Path, prompts: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "d")
    eyas("data", target, *out, "--show", 1).failed(1, "is no training data")
    eyas("data", tmp_path / "none", *out, "--endpoint", "http://127.0.0.1:9").failed(1, "there is no folder")
    eyas("data", target, *out, "--endpoint", "http://127.0.0.1:9", "--retries", 0, "--prompts", prompts).failed(
        1, "cannot be reached", "What was made is kept"
    )
    prompts.write_text("not json\n")
    eyas("data", target, *out, "--prompts", prompts).failed(1, "line 1 is not JSON")
    plain = tiny.save(tmp_path / "plain", template=None)
    eyas("data", plain, *out, "--conversations", 2).failed(1, "no chat template")
