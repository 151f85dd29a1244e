"""Everything that is wrong with a pair is one clear error on one screen."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from cli import tiny
from safetensors.torch import load_file, save_file
from zoo import VOCAB

from eyas.drafter import storage
from eyas.drafter.model import untrained

ASK = ("w5 w9", "--max-tokens", "4")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((64, 4, VOCAB), ["hidden size 64", "32"]),
        ((32, 4, 200), ["vocabulary size 200", "160"]),
        ((32, 24, VOCAB), ["entry ids [2, 12, 21]", "4 layers"]),
    ],
)
def test_a_drafter_for_another_target(eyas, target, tmp_path, sizes, words):
    storage.save(untrained(*sizes), tmp_path)
    eyas("run", target, *ASK, "--drafter", tmp_path).failed(1, str(tmp_path), *words)


def missing(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, folder / "model.safetensors")


def extra(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "surprise.weight": torch.zeros(3)}, folder / "model.safetensors")


def misshapen(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "norm.weight": torch.ones(7)}, folder / "model.safetensors")


def truncated(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def out_of_range(folder):
    tensors = load_file(folder / "model.safetensors")
    offsets = torch.zeros(VOCAB, dtype=torch.int64)
    offsets[-1] = 10**6
    save_file({**tensors, "d2t": offsets}, folder / "model.safetensors")


def no_config(folder):
    (folder / "config.json").unlink()


def no_json(folder):
    (folder / "config.json").write_text("{")


def no_size(folder):
    config = json.loads((folder / "config.json").read_text())
    config["hidden_size"] = "wide"
    (folder / "config.json").write_text(json.dumps(config))


FAULTS = {
    missing: "fc.weight",
    extra: "surprise.weight",
    misshapen: "norm.weight",
    truncated: "truncated or damaged",
    out_of_range: "d2t",
    no_config: "config.json: missing",
    no_json: "not valid JSON",
    no_size: "hidden_size",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_broken_drafter_is_found_before_the_target_is_loaded(eyas, drafter, tmp_path, fault):
    folder = shutil.copytree(drafter, tmp_path / "broken")
    fault(folder)
    eyas("run", "/no/such/target", *ASK, "--drafter", folder).failed(1, str(folder), FAULTS[fault])
    checked = eyas("check", folder)
    assert checked.code == 1 and "Traceback" not in checked.err
    assert FAULTS[fault] in " ".join((checked.out + checked.err).split())


def test_no_drafter_and_no_target_there(eyas, target, tmp_path):
    eyas("run", target, *ASK, "--drafter", tmp_path / "none").failed(1, "no such file")
    eyas("run", tmp_path / "none", *ASK).failed(1, "there is no folder")
    eyas("run", target, *ASK, "--drafter", target).failed(1, str(target))


def test_a_truncated_target(eyas, target, tmp_path):
    folder = shutil.copytree(target, tmp_path / "target")
    truncated(folder)
    eyas("run", folder, *ASK).failed(1, "damaged or truncated")


def test_a_prompt_longer_than_the_context(eyas, target):
    eyas("run", target, "w5 " * 600).failed(2, "602 tokens", "512")
    eyas("run", target, "w5 " * 20, "--context-length", 16).failed(2, "22 tokens", "16")
    eyas("run", target, "w5", "--context-length", 100_000).failed(
        2, "context_length must be from 2 to the target's 512"
    )


def test_nan_logits(eyas, tmp_path):
    sick = tiny.save(tmp_path, tiny.poisoned())
    assert eyas("run", sick, *ASK).code == 0
    eyas("run", sick, "w40", "--drafter", "untrained").failed(1, "NaN")
    eyas("run", sick, "w40", "--compare", "--drafter", "untrained").failed(1, "NaN")


def test_unknown_dtype_and_device(eyas, target):
    eyas("run", target, *ASK, "--dtype", "int3").failed(2, "unknown dtype 'int3'")
    eyas("run", target, *ASK, "--device", "abacus").failed(2, "unknown device 'abacus'")


def test_debug_shows_where(eyas, target, tmp_path):
    ran = eyas("run", target, *ASK, "--drafter", tmp_path / "none", "--debug")
    assert ran.code == 1 and "Traceback" in ran.err and "error: " in ran.err
