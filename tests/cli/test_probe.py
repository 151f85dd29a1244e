"""``eyas probe``: a drafter whose checkpoint says the wrong thing is read as it was trained, and written so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from bridges.launching import CALLS, REPLY, SERVER, engine
from cli import tiny
from engine.harness import truth
from safetensors.numpy import load_file, save_file
from training.taught import LENGTHS, NAME, taught

from eyas.bridges import holders
from eyas.drafter import storage
from eyas.drafter.checkpoint import Checkpoint
from eyas.drafter.dialects import read

TAUGHT = [truth(NAME, length=length) for length in LENGTHS[:3]]  # questions whose answers the drafter was taught
QUESTIONS = [
    tiny.tokenizer().decode([*told.prompt, *told.tokens[:known]]) for told in TAUGHT for known in (0, 12, 24, 36)
]
IDS = "eagle_aux_hidden_state_layer_ids"
RIGHT, LOW = (1, 2, 4), (0, 1, 3)  # entry ids: as taught, and one lower


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A target that reads a question as it is."""
    return tiny.save(tmp_path_factory.mktemp("plain"), template=None)


@pytest.fixture
def asked(tmp_path) -> tuple[object, ...]:
    file = tmp_path / "birds.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    return ("--prompts", file, "--limit", len(QUESTIONS), "--max-tokens", 24)


def saved(folder: Path, kind: str = "standard", dialect: str = "sglang") -> Path:
    storage.save(taught(kind).model, folder, dialect)
    return folder


def edited(folder: Path, **config: object) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def remapped(folder: Path, **maps: np.ndarray | None) -> Path:
    """With these vocabulary maps in place of its own; None leaves one out."""
    tensors = load_file(folder / "model.safetensors") | maps
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def verdict(ran):
    return next(record for record in ran.records if record["kind"] == "verdict")


def readings(ran):
    return {record["name"]: record for record in ran.records if record["kind"] == "reading"}


def test_a_sound_drafter(eyas, plain, asked, tmp_path):
    ran = eyas("probe", plain, saved(tmp_path / "d"), *asked, "--json")
    assert ran.code == 0, ran.err
    found = readings(ran)
    assert set(found) == {"as read", "shift -1", "norm_before_residual true", "norm_output true"}
    assert found["as read"]["layer_ids"] == list(RIGHT) and found["shift -1"]["layer_ids"] == list(LOW)
    assert found["as read"]["acceptance_length"] > 1.2 and found["as read"]["emitted"] == len(QUESTIONS) * 23
    low, high = found["shift -1"]["better"]
    gain = found["shift -1"]["agreement"] - found["as read"]["agreement"]
    assert low <= gain <= high < 0
    said = verdict(ran)
    assert (said["name"], said["fault"], said["fix"]) == ("as read", False, "")
    assert said["left_out"] == ["shift +1 was left out: entry ids [2, 3, 5] are not all within 0..4"]


def test_ids_one_too_low_are_found_and_written(eyas, plain, asked, tmp_path):
    source = edited(saved(tmp_path / "d"), eagle_config={IDS: [i - 1 for i in LOW], "use_aux_hidden_state": True})
    out = tmp_path / "out"
    ran = eyas("probe", plain, source, *asked, "--write", out, "--json")
    assert ran.code == 1, ran.err
    said = verdict(ran)
    assert (said["name"], said["layer_ids"]) == ("shift +1", list(RIGHT))
    assert "output ids that were taken for entry ids" in said["text"] and "entering layers [1, 2, 4]" in said["text"]
    assert said["change"] == {"eagle_config": {IDS: [0, 1, 3], "use_aux_hidden_state": True}}
    assert "--drafter-layer-ids 1,2,4" in said["fix"] and f'"{IDS}": [0, 1, 3]' in said["fix"]
    assert ran.records[-1] == {"kind": "written", "path": str(out), "dialect": "sglang"}
    written = read(Checkpoint.open(out))
    assert not written.problems and written.config.aux_layer_ids == RIGHT
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)
    again = eyas("probe", plain, out, *asked, "--json")
    assert again.code == 0 and verdict(again)["name"] == "as read"


def test_entry_ids_at_the_top_level_are_written_there(eyas, plain, asked, tmp_path):
    source = edited(saved(tmp_path / "d", dialect="vllm"), **{IDS: list(LOW)})
    ran = eyas("probe", plain, source, *asked, "--json")
    assert ran.code == 1 and verdict(ran)["change"] == {IDS: list(RIGHT)}


@pytest.mark.parametrize("mask", [True, False], ids=["t2d says otherwise", "nothing says otherwise"])
def test_a_d2t_of_ids(eyas, plain, asked, tmp_path, mask):
    """With t2d the checkpoint contradicts itself, and is not usable as it is; without, it is read for another one."""
    ids = np.arange(0, 120, 3)
    source = remapped(saved(tmp_path / "d", "reduced vocabulary"), d2t=ids, **({} if mask else {"t2d": None}))
    ran = eyas("probe", plain, source, *asked, "--write", tmp_path / "out", "--json")
    assert ran.code == 1, ran.err
    said = verdict(ran)
    assert said["name"] == "d2t as ids" and "holds target ids" in said["text"]
    assert ("as read" in readings(ran)) != mask
    assert bool([why for why in said["left_out"] if "as read it cannot be used" in why]) == mask
    d2t = load_file(tmp_path / "out" / "model.safetensors")["d2t"]
    assert np.array_equal(d2t + np.arange(40), ids)


def test_a_d2t_of_ids_that_are_no_offsets(eyas, plain, asked, tmp_path):
    """As in real vocabularies: read as offsets they lead outside. (They are not the tokens that it was taught.)"""
    ids = np.arange(120, 160)
    source = remapped(saved(tmp_path / "d", "reduced vocabulary"), d2t=ids, t2d=None)
    ran = eyas("probe", plain, source, *asked, "--json")
    assert ran.code == 1, ran.err
    assert set(readings(ran)) == {"d2t as ids"} and "as read it cannot be used" in verdict(ran)["left_out"][-1]


def test_a_missing_d2t_follows_from_t2d(eyas, plain, asked, tmp_path):
    source = remapped(saved(tmp_path / "d", "reduced vocabulary"), d2t=None)
    ran = eyas("probe", plain, source, *asked, "--json")
    assert ran.code == 1 and verdict(ran)["name"] == "d2t from t2d"


def test_a_flag_that_was_lost(eyas, plain, asked, tmp_path):
    source = edited(saved(tmp_path / "d", "two layers, all norms", "vllm"), norm_before_residual=False)
    ran = eyas("probe", plain, source, *asked, "--json")
    assert ran.code == 1 and verdict(ran)["name"] == "norm_before_residual true"
    assert verdict(ran)["change"] == {"norm_before_residual": True}


def test_a_flag_that_makes_no_difference_is_said_to_be_unsure(eyas, plain, asked, tmp_path):
    """What norm_output does not norm, norm_before_residual does."""
    source = edited(saved(tmp_path / "d", "two layers, all norms", "vllm"), norm_output=False)
    ran = eyas("probe", plain, source, *asked, "--json")
    assert ran.code == 0 and verdict(ran)["name"] == "as read"
    assert "no sure difference to norm_output true:" in verdict(ran)["text"]


def test_a_rope_that_was_lost(eyas, plain, asked, tmp_path):
    lost = {"rope_type": "default", "rope_theta": 1.5}
    source = edited(saved(tmp_path / "d"), rope_theta=1.5, rope_parameters=lost)
    ran = eyas("probe", plain, source, *asked, "--write", tmp_path / "out", "--json")
    assert ran.code == 1 and verdict(ran)["name"] == "RoPE of the target"
    assert verdict(ran)["change"] == {"rope_theta": 10000.0, "rope_parameters": {**lost, "rope_theta": 10000.0}}
    assert read(Checkpoint.open(tmp_path / "out")).config.rope["rope_theta"] == 10000.0


def test_a_drafter_of_something_else(eyas, plain, asked, drafter, tmp_path):
    ran = eyas("probe", plain, drafter, *asked, "--write", tmp_path / "out", "--json")
    assert ran.code == 2 and not (tmp_path / "out").exists()  # there is nothing right to write
    assert verdict(ran)["name"] == "" and "no reading of this checkpoint drafts" in verdict(ran)["text"]
    ran = eyas("probe", plain, drafter, *asked, "--json")
    assert ran.code == 1 and "eyas train" in verdict(ran)["fix"]


def test_what_a_person_sees(eyas, plain, asked, tmp_path):
    source = edited(saved(tmp_path / "d"), eagle_config={IDS: [i - 1 for i in LOW]})
    ran = eyas("probe", plain, source, *asked)
    assert ran.code == 1
    assert "Acceptance by reading of the checkpoint" in ran.out and "shift +1" in ran.out
    assert "found: shift +1 is right" in ran.out and "fix: in config.json:" in ran.out
    assert "measuring" in ran.err and "note: shift -1 was left out" in ran.err
    assert max(map(len, ran.out.splitlines())) <= 100


def test_built_in_prompts(eyas, target, drafter):
    ran = eyas("probe", target, drafter, "--limit", 1, "--max-tokens", 4, "--json")
    assert ran.code in (0, 1) and readings(ran)["as read"]["emitted"] == 3 * 3


def test_an_engine_s_trace(eyas, target, drafter, tmp_path, monkeypatch):
    """Of an engine in miniature, which feeds its drafter the first tokens that come to mind."""
    (tmp_path / "lines").write_text("".join(json.dumps(call) + "\n" for call in CALLS))
    (tmp_path / "reply").write_text(json.dumps([200, REPLY]))
    folder = engine(tmp_path / "engine", "sglang", SERVER)
    for name, value in (("PYTHONPATH", folder), ("HERE", tmp_path), ("EYAS_CACHE", tmp_path / "cache")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(holders, "_SMI", "no-nvidia-smi")
    source = edited(shutil.copytree(drafter, tmp_path / "d"), eagle_config={IDS: [0, 1, 2]})
    asked = ("--limit", 1, "--max-tokens", 4, "--engine", "sglang")
    ran = eyas("probe", target, drafter, *asked, "--json")
    assert ran.code == 1 and ran.records[-1]["kind"] == "verdict" and "--no-check" not in ran.err
    assert "sglang 0.7.1 cannot be traced with this pair: models/llama.py" in ran.err
    assert "entry id 4 is never entered by a target of 4 layers" in ran.err and "\nfix: " in ran.err
    ran = eyas("probe", target, source, *asked, "--json")
    assert ran.code == 1, ran.err
    fed = json.loads((tmp_path / "said").read_text())["asked"]["input_ids"]
    trace = ran.records[-1]
    assert (trace["kind"], trace["steps"], trace["dtype"]) == ("trace", 1, "bfloat16")
    assert trace["drafter"]["class"] == "LlamaForCausalLMEagle3"
    fault = trace["fault"]
    assert (fault["stage"], fault["place"], fault["depth"]) == ("tokens", 0, 0)
    assert f"token {CALLS[2]['tokens'][0]} in place of {fed[1]}" in fault["text"] and "sglang" in fault["fix"]
    ran = eyas("probe", target, source, *asked)
    shown = " ".join(ran.out.split())
    assert ran.code == 1 and "Trace of sglang: 1 forward of LlamaForCausalLMEagle3, bfloat16" in shown
    assert f"found: tokens: {fault['text']} (first seen at slot 0) fix: {fault['fix']}" in shown


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--engine-python", "/nowhere"), "--engine-python needs --engine vllm or sglang"),
        (("--reference", "d"), "--reference needs --engine"),
        (("--engine", "vllm", "--engine-python", "/nowhere"), "no Python there"),
        (("--limit", "0"), "--limit must be at least 1"),
        (("--max-tokens", "1"), "--max-tokens must be at least 2"),
        (("--force",), "--force replaces what --write wrote"),
        (("--", "--dtype", "float32"), "the engine's own flags needs --engine"),
    ],
)
def test_bad_usage(eyas, target, drafter, args, says):
    eyas("probe", target, drafter, *args).failed(2, says)


def test_nothing_is_loaded_for_what_cannot_be_written(eyas, target, drafter, tmp_path):
    (tmp_path / "mine").write_text("")
    eyas("probe", target, drafter, "--write", tmp_path / "mine").failed(2, "exists and is not a folder")
    eyas("probe", target, drafter, "--write", drafter).failed(2, "holds the source")
    eyas("probe", target, tmp_path / "nothing").failed(1, "no such file")
