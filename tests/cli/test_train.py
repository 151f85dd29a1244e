from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training import sets

from eyas.training.config import TrainConfig

QUICK = ("--eval-tokens", 8, "--eval-prompts", 3, "--eval-builtin", 3, "--batch-tokens", 256, "--precision", "float32")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sets.write(tmp_path_factory.mktemp("train") / "data", sets.rows(40)).folder


def test_the_whole_way(eyas: Any, target: Path, tmp_path: Path) -> None:
    """From a target alone to a drafter that is run, through the command line only."""
    prompts, out = tmp_path / "p.jsonl", tmp_path / "drafter"
    prompts.write_text("".join(json.dumps({"prompt": f"w{n} w{n + 3} w{2 * n}"}) + "\n" for n in range(3, 35)))
    made = eyas(
        "data",
        target,
        "--out",
        tmp_path / "d",
        "--prompts",
        prompts,
        "--max-answer-tokens",
        16,
        "--max-length",
        64,
        "--context-length",
        128,
        "--temperatures",
        0,
    )
    assert made.code == 0, made.err
    trained = eyas("train", target, "--data", tmp_path / "d", "--out", out, *QUICK, "--epochs", 3)
    assert trained.code == 0, trained.err
    assert "acceptance length" in trained.out and "the best so far, kept" in trained.err
    measured = eyas("eval", target, out, "--limit", 1, "--max-tokens", 8, "--temperature", 0, "--no-simulate", "--json")
    assert measured.code == 0, measured.err
    ran = eyas("run", target, "w5 w9", "--drafter", out, "--max-tokens", 12, "--compare")
    assert ran.code == 0, ran.err
    assert eyas("check", out).code == 0


def test_records(eyas: Any, target: Path, data: Path, tmp_path: Path) -> None:
    command = ("train", target, "--data", data, "--out", tmp_path / "out", *QUICK, "--epochs", 4, "--json")
    ran = eyas(*command)
    assert ran.code == 0, ran.err
    notes, *others, done = ran.records[1:]
    assert "covers" in notes["note"]
    assert [r["step"] for r in others if "loss" in r] == [*range(10, done["steps"], 10), done["steps"]]
    (found,) = [r["evaluation"] for r in others if "evaluation" in r]
    assert done["best"] == found and done["finished"] and done["step"] == found["step"]
    eyas(*command).failed(2, "--resume goes on")


def test_plan(eyas: Any, target: Path, data: Path, tmp_path: Path) -> None:
    command = ("train", target, "--data", data, "--out", tmp_path / "out", *QUICK, "--epochs", 2, "--plan")
    (planned,) = [r for r in eyas(*command, "--json").records if "updates" in r]
    assert planned["conversations"] == 37 and planned["held_out"] == 3
    assert planned["tokens"] == 37 * 30 and planned["written"] == 37 * 24 and planned["total_tokens"] <= 2 * 37 * 30
    assert planned["tokens_per_second"] > 0 and planned["peak_bytes"] > 1 << 20
    assert planned["seconds"] == pytest.approx(planned["total_tokens"] / planned["tokens_per_second"])
    shown = eyas(*command, "--resume")  # there is nothing yet, and nothing is looked for
    assert shown.code == 0 and "37 conversations, 1,110 tokens" in shown.out and "tokens/s, measured" in shown.out
    assert not (tmp_path / "out").exists()


def test_resumed(eyas: Any, target: Path, data: Path, tmp_path: Path) -> None:
    command = ("train", target, "--data", data, "--out", tmp_path / "out", *QUICK, "--eval-every", 0)
    first = eyas(*command, "--stop-after", "1e-9")
    assert first.code == 0 and "unfinished: --resume" in " ".join(first.out.split())
    again = eyas(*command, "--resume", "--json")
    assert again.code == 0 and again.records[-1]["finished"]
    eyas(*command, "--resume", "--seed", 3).failed(2, "begun with seed 0")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--unroll", 0), ["unroll must be at least 1, got 0"]),
        (("--learning-rate", "nan"), ["learning_rate must be above 0"]),
        (("--warmup", 2), ["warmup is a share"]),
        (("--eval-prompts", 0, "--eval-builtin", 0), ["needs prompts"]),
        (("--aux-layers", "1,x"), ["numbers with commas"]),
        (("--aux-layers", "1,9"), ["from 0 to 4"]),
    ],
)
def test_settings_that_cannot_be(
    flags: tuple[Any, ...], words: list[str], eyas: Any, target: Path, data: Path, tmp_path: Path
) -> None:
    eyas("train", target, "--data", data, "--out", tmp_path / "out", *flags).failed(2, *words)


def test_every_setting_is_a_flag_and_documented(eyas: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = eyas("train", "--help").out
    guide = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    for setting in fields(TrainConfig):
        if setting.name not in ("target", "data", "out"):
            flag = f"--{setting.name.replace('_', '-')}"
            assert flag in shown and f"`{flag}`" in guide, flag


@pytest.mark.thorough
def test_two_processes_are_two_batches_an_update(eyas: Any, target: Path, data: Path, tmp_path: Path) -> None:
    """The same weights as one process that accumulates, and only one of the two speaks and writes."""
    command = ["train", target, "--data", data, *QUICK, "--device", "cpu", "--eval-every", 0, "--out"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "eyas"]
    ran = subprocess.run(
        [str(part) for part in [*launch, *command, tmp_path / "two"]],
        # a precision of accelerate's own, as its settings may have it, is not asked for
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
            "ACCELERATE_MIXED_PRECISION": "bf16",
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("drafter ") == 1
    assert eyas(*command, tmp_path / "one", "--accumulation", 2).code == 0
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-5, atol=1e-6)
