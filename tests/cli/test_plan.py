"""``eyas plan``: a verdict without hardware, in tables, as Markdown and as JSON."""

from __future__ import annotations

import json

import pytest

CONFIG = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}
ON_H100 = ("--hardware", "h100-sxm")


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


def test_as_json(eyas, config):
    ran = eyas("plan", config, *ON_H100, "--acceptance", "0.8,0.7,0.6", "--concurrency", "1,64", "--json")
    assert ran.code == 0, ran.err
    first, *points = ran.records
    assert first["kind"] == "plan" and first["target"]["parameters"] == pytest.approx(8.03e9, rel=1e-3)
    assert first["hardware"]["memory_gb_s"] == 3350 and first["drafter"]["name"] == "of the usual shape"
    assert [(point["kind"], point["concurrency"]) for point in points] == [("point", 1), ("point", 64)]
    for point in points:
        plain, verify, draft = (point["steps"][name] for name in ("plain", "verify", "draft"))
        for split in (plain, verify, draft):
            assert split["total"] == pytest.approx(sum(value for name, value in split.items() if name != "total"))
        assert point["break_even_acceptance_length"] == pytest.approx(
            (verify["total"] + draft["total"]) / plain["total"]
        )
        assert point["speedup"] == pytest.approx(point["acceptance_length"] / point["break_even_acceptance_length"])
    # 7.5 billion weights in 16 bits at 0.9 x 3,350 GB/s
    assert points[0]["steps"]["plain"]["weights"] == pytest.approx(15.01e9 / 3015e9, rel=1e-3)


def test_tables(eyas, config, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    ran = eyas("plan", config.parent, *ON_H100, "--steps", 3, "--acceptance-length", 2.5, "--concurrency", "1,8")
    assert ran.code == 0, ran.err
    assert max(map(len, ran.out.splitlines())) <= 100
    for words in ("8.0 B weights", "GQA, 128 KiB", "h100-sxm", "chain 3", "2.50", "verify", "should pay at every"):
        assert words in ran.out
    ran = eyas("plan", config, *ON_H100, "--steps", 3, "--topk", 1, "--markdown", "--concurrency", 1)
    lines = ran.out.splitlines()
    assert lines[0] == "### Speculation" and lines[4].endswith("| - | - | - |") and "| 1 | plain |" in ran.out
    ran = eyas("plan", config, *ON_H100)
    assert "unknown without acceptance" in ran.out


def test_a_drafter_and_a_machine_of_ones_own(eyas, config, tmp_path):
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1, "draft_vocab_size": 8000}))
    box = tmp_path / "box.yaml"
    box.write_text("memory_gb: 80\nmemory_gb_s: 2000\ntflops: {bf16: 300}\n")
    ran = eyas("plan", config, "--drafter", drafter, "--hardware", box, "--json")
    assert ran.code == 0, ran.err
    assert ran.records[0]["drafter"]["name"] == str(drafter) and ran.records[0]["hardware"]["name"] == "box"
    assert ran.records[0]["drafter"]["weight_bytes"] < 2 * 0.42e9


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--hardware", "h1000"), ("no hardware called 'h1000'", "h100-sxm")),
        (("--hardware", "none.yaml"), ("none.yaml cannot be read",)),
        ((*ON_H100, "--acceptance", "0.7", "--acceptance-length", 2), ("--acceptance and --acceptance-length",)),
        ((*ON_H100, "--acceptance", "high"), ("--acceptance takes numbers", "'high'")),
        ((*ON_H100, "--acceptance", "0.7,1.7"), ("between 0 and 1", "1.7")),
        ((*ON_H100, "--acceptance-length", 2), ("belongs to one draft shape",)),
        ((*ON_H100, "--acceptance-length", 9, "--steps", 3), ("3 steps emit between 1 and 4 tokens, not 9",)),
        ((*ON_H100, "--concurrency", "1,many"), ("--concurrency takes whole numbers", "'1,many'")),
        ((*ON_H100, "--steps", 0), ("--steps takes whole numbers",)),
        ((*ON_H100, "--topk", 2, "--draft-tokens", 1), ("leave no draft shape",)),
        ((*ON_H100, "--gpus", 3), ("do not divide among 3 GPUs",)),
        ((*ON_H100, "--gpus", 0), ("gpus must be at least 1",)),
        ((*ON_H100, "--context", -1), ("context must be at least 1",)),
        ((*ON_H100, "--all-reduce", "magic"), ("no all-reduce called 'magic'", "one-shot, ring")),
        ((*ON_H100, "--quantization", "q4"), ("--quantization is one of",)),
        ((*ON_H100, "--json", "--markdown"), ("exclude each other",)),
    ],
)
def test_impossible_wishes(eyas, config, args, words):
    eyas("plan", config, *args).failed(2, *words)


def test_targets_and_drafters_that_are_none(eyas, config, tmp_path):
    eyas("plan", tmp_path / "none", *ON_H100).failed(2, "none does not exist")
    other = tmp_path / "other.json"
    other.write_text('{"a": 1}')
    eyas("plan", other, *ON_H100).failed(1, "does not describe a language model", "hidden_size")
    other.write_text("nonsense")
    eyas("plan", other, *ON_H100).failed(1, "other.json: not valid JSON")
    eyas("plan", config, *ON_H100, "--drafter", other).failed(1, "other.json: not valid JSON")
    eyas("plan", config, *ON_H100, "--drafter", tmp_path / "missing").failed(2, "a folder with config.json")
