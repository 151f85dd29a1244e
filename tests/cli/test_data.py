from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
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


@pytest.mark.parametrize("endpoint", [(), ("--endpoint", "http://127.0.0.1:9")])
def test_without_the_extra_it_says_so_before_the_work(
    endpoint: tuple[str, ...], eyas: Any, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr("eyas.engine.llm.load", lambda *args, **how: pytest.fail("loaded the target first"))
    needed = (1, "needs pyarrow", "eyas[train]")
    eyas("data", target, "--out", tmp_path / "d", *endpoint).failed(*needed)
    assert not (tmp_path / "d").exists()
    (tmp_path / "made").mkdir()
    eyas("data", target, "--out", tmp_path / "made", "--show", 1).failed(*needed)
    eyas("train", target, "--data", tmp_path / "made", "--out", tmp_path / "o").failed(*needed)


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


def test_what_prompts_are_steered_by_reaches_the_target(
    eyas: Any, target: Path, tmp_path: Path, server: talkers.Server
) -> None:
    (tmp_path / "topics.txt").write_text("w20 w21 w22\n\n w23 w24 w25 \n")
    steered = ("--kind", "write", "--topics", tmp_path / "topics.txt", "--system", "w9 w9", "--max-prompt-tokens", 9)
    sampled = ("--prompt-temperatures", 0.5, "--temperatures", "0.25", "--top-p", 0.75, "--max-answer-tokens", 11)
    server.repeats = "w5"
    command = ("data", target, "--out", tmp_path / "d", "--endpoint", server.url, "--conversations", 6)
    assert eyas(*command, *steered, *sampled).code == 0
    here, asked = tiny.tokenizer(), server.asked[1:]  # the first one only finds out what the server can do
    texts = {request["temperature"]: "" for request in asked}
    for request in asked:
        text = here.decode(request["prompt"])
        assert text.startswith("system w9 w9 user") and request["top_p"] == 0.75
        assert request["max_tokens"] == (9 if request["temperature"] == 0.5 else 11)
        texts[request["temperature"]] += f"{text}\n"
    assert set(texts) == {0.5, 0.25} and re.search("w20 w21|w23 w24", texts[0.25])
    recipe = json.loads((tmp_path / "d" / "manifest.json").read_text())["recipe"]
    assert (recipe["kinds"], recipe["systems"]) == (["write"], ["w9 w9"])


def test_being_told_to_end_is_like_ctrl_c(
    eyas: Any, target: Path, prompts: Path, tmp_path: Path, server: talkers.Server
) -> None:
    """What there is becomes a shard, and the same command goes on from it."""
    folder = tmp_path / "d"
    command = ("data", target, "--out", folder, "--prompts", prompts, "--endpoint", server.url, "--concurrency", 1)
    server.delay = 0.3
    running = subprocess.Popen([sys.executable, "-m", "eyas", *map(str, command)], stderr=subprocess.PIPE)
    journal, deadline = folder / "data-00000.jsonl", time.monotonic() + 60
    while not (journal.is_file() and journal.read_bytes().count(b"\n") >= 2):
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGTERM)
    assert b"Traceback" not in running.communicate(timeout=60)[1] and running.returncode == 130
    found = Dataset.open(folder)
    assert 2 <= len(found) < 6 and not found.manifest.complete and not journal.exists()
    server.delay = 0
    assert eyas(*command).code == 0
    assert sorted(row.provenance["line"] for row in Dataset.open(folder)) == [1, 2, 3, 4, 5, 6]


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
        (("--concurrency", 0), "--concurrency must be at least 1, got 0"),
        (("--max-length", 0), "conversations 32"),
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
