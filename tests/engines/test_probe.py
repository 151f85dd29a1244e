"""``eyas probe`` on the real vLLM on CPU: what is wrong with a drafter is named from what the engine was seen to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.drafter.convert import convert
from eyas.drafter.shipped import shipped_drafter

pytestmark = [pytest.mark.engines, pytest.mark.real, pytest.mark.timeout(1800)]

FLAGS = ("--max-model-len", "1024", "--dtype", "float32")
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """The shipped drafter as vLLM reads it."""
    found = shipped_drafter("smollm2")
    if found is None:
        pytest.skip("NOT TESTED: no drafter of SmolLM2 comes with this Eyas")
    convert(found, "vllm", tmp_path / "good")
    return tmp_path / "good"


def changed(good: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    bad = good.parent / "bad"
    shutil.copytree(good, bad)
    config = json.loads((bad / "config.json").read_text())
    edit(config)
    (bad / "config.json").write_text(json.dumps(config))
    return bad


def probe(python: Path, drafter: Path, *arguments: object) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "eyas", "probe", "smollm2", str(drafter), "--engine", "vllm", "--engine-python"]
    command += [str(python), "--dtype", "float32", "--json", *map(str, arguments)]
    if "--limit" not in arguments:
        command += ["--limit", "4", "--max-tokens", "24"]
    ran = subprocess.run([*command, "--", *FLAGS], capture_output=True, text=True)
    records = [json.loads(line) for line in ran.stdout.splitlines()]
    assert records and records[-1]["kind"] == "trace", ran.stderr[-4000:]
    return ran.returncode, records


def verdict(records: list[dict[str, Any]]) -> str:
    return next(record["name"] for record in records if record["kind"] == "verdict")


def test_a_good_pair(python, good):
    code, records = probe(python, good)
    trace = records[-1]
    assert (code, verdict(records), trace["fault"]) == (0, "as read", None)
    assert trace["rows"] > 60 and trace["dtype"] == "float32"
    assert trace["drafter"]["class"] == "Eagle3LlamaForCausalLM"
    assert max(trace["off"].values()) < 0.003, trace["off"]  # Eyas and vLLM compute the same


def test_ids_that_are_one_too_low(python, good):
    """No default, which luck would make right: read as it was trained, and vLLM is seen to do otherwise."""

    def lower(config: dict[str, Any]) -> None:
        config[IDS] = [i - 1 for i in config[IDS]]

    code, records = probe(python, changed(good, lower), "--limit", 8, "--max-tokens", 48)
    fault = records[-1]["fault"]
    assert (code, verdict(records), fault["stage"]) == (1, "shift +1", "states")
    assert fault["captured"] == [1, 14, 26] and "trained on [2, 15, 27]" in fault["text"]
    assert "does what the checkpoint says" in fault["fix"] and "--write OUT" in fault["fix"]


def test_a_d2t_of_another_order(python, good):
    bad = changed(good, lambda config: None)
    tensors = load_file(bad / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    tensors["d2t"] = ids.flip(0) - torch.arange(len(ids))
    save_file(tensors, bad / "model.safetensors", {"format": "pt"})
    code, records = probe(python, bad, "--reference", good)
    assert code == 1 and records[-1]["fault"]["stage"] == "d2t"
    assert verdict(records) == "d2t from t2d"  # the same tokens, in another order


def test_a_rope_that_was_lost(python, good):
    def lose(config: dict[str, Any]) -> None:
        layer = config["transformer_layer_config"]
        layer["rope_theta"] = layer["rope_parameters"]["rope_theta"] = 10000.0

    code, records = probe(python, changed(good, lose), "--reference", good)
    assert code == 1 and records[-1]["fault"]["stage"] == "rope"
    assert records[-1]["drafter"]["config"]["rope_parameters"]["rope_theta"] == 10000.0
