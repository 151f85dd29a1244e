"""From every dialect to every other and back: the same bits, the same drafter, or a reason why not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bridges.engines import SGLANG
from bridges.engines import write as write_engine
from drafter.folders import CONFIGS, IDS, LLAMA, D, H, V, maps_as_npy, noise, shard, write
from drafter.test_reading import load, second_layer
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from eyas.cli.main import main
from eyas.core import CheckpointError, UsageError
from eyas.drafter import convert as module
from eyas.drafter.checkpoint import Checkpoint
from eyas.drafter.convert import Conversion, convert
from eyas.drafter.dialects import read
from eyas.drafter.engines import limits
from eyas.drafter.verifier import Verifier

DIALECTS = ("eagle", "sglang", "vllm")
RECENT = ("sglang", "vllm")
TARGET = Verifier("some/model", ("LlamaForCausalLM",), H, V, 10, 8192)
FULL = {"tensors": {"lm_head.weight": noise((V, H))}, "without": ("d2t", "t2d")}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 2.0, "original_max_position_embeddings": 64}


def fc_norms() -> dict[str, torch.Tensor]:
    return {f"fc_norm.{i}.weight": noise((H,), number=i) for i in range(3)}


def layers(dialect: str) -> dict[str, Any]:
    norm = {"sglang": "hidden_norm", "vllm": "input_layernorm"}[dialect]
    return {"tensors": second_layer(norm), "layer": {"num_hidden_layers": 2}}


# What differs from the standard drafter, and who can say it. "layer" are keys that speculators nest.
VARIANTS: dict[str, tuple[tuple[str, ...], Any]] = {
    "reduced": (DIALECTS, {}),
    "full": (DIALECTS, {**FULL, "draft_vocab_size": V}),
    "own embedding": (DIALECTS, {"tensors": {"embed_tokens.weight": noise((V, H))}}),
    "another width": (
        DIALECTS,
        {"tensors": {"fc.weight": noise((H, 72)), "embed_tokens.weight": noise((V, H))}, "target_hidden_size": 24},
    ),
    "linear rope": (DIALECTS, {"layer": {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}}),
    "low and mixed precision": (
        DIALECTS,
        {"tensors": {"fc.weight": noise((H, 3 * H)).bfloat16(), "norm.weight": noise((H,)).half()}},
    ),
    "chosen layers": (RECENT, {"ids": (0, 4, 10)}),
    "default layers": (RECENT, {"ids": None}),
    "four states": (RECENT, {"tensors": {"fc.weight": noise((H, 4 * H))}, "ids": (1, 2, 5, 7)}),
    "3.1 norms": (RECENT, {"tensors": fc_norms(), "fc_norm": True, "norm_output": True}),
    "one norm before fc": (RECENT, {"tensors": {"input_norm.weight": noise((3 * H,))}, "norm_before_fc": True}),
    "two layers": (RECENT, layers),
    "borrowed head": (RECENT, {"without": ("lm_head.weight", "d2t", "t2d"), "draft_vocab_size": V}),
    "llama3 rope": (RECENT, {"layer": {"rope_parameters": LLAMA3}}),
    "yarn": (RECENT, {"layer": {"rope_parameters": YARN}}),
    "tied head": (
        ("sglang",),
        {
            "without": ("lm_head.weight", "d2t", "t2d"),
            "draft_vocab_size": V,
            "layer": {"tie_word_embeddings": True},
        },
    ),
    "other order": (
        ("sglang",),
        {
            "tensors": {
                "lm_head.weight": noise((V, H)),
                "d2t": torch.arange(V - 1, -V, -2),
                "t2d": torch.ones(V).bool(),
            },
            "draft_vocab_size": V,
        },
    ),
    "residual, q/k norms, biases": (
        ("vllm",),
        {
            "tensors": {
                "layers.0.self_attn.q_norm.weight": noise((8,)),
                "layers.0.self_attn.k_norm.weight": noise((8,)),
                "layers.0.self_attn.q_proj.bias": noise((32,)),
                "layers.0.self_attn.k_proj.bias": noise((16,)),
                "layers.0.self_attn.v_proj.bias": noise((16,)),
                "layers.0.self_attn.o_proj.bias": noise((32,)),
            },
            "layer": {"model_type": "qwen3", "attention_bias": True},
            "norm_before_residual": True,
        },
    ),
}
PAIRS = [
    (name, one, other)
    for name, (able, _) in VARIANTS.items()
    for one in able
    for other in able
    if len(able) == 1 or one != other
]


def drafter(folder: Path, dialect: str, variant: str = "reduced") -> Path:
    """A folder written by hand in ``dialect``."""
    said = VARIANTS[variant][1]
    said = dict(said(dialect) if callable(said) else said)
    layer, tensors = said.pop("layer", {}), said.pop("tensors", {})
    ids = said.pop("ids", (2, 5, 7) if dialect != "eagle" else None)
    if dialect == "vllm":
        said.setdefault("norm_before_residual", False)
        nested = {k: v for k, v in CONFIGS["vllm"]["transformer_layer_config"].items() if k != "rope_parameters"}
        said["transformer_layer_config"] = {**nested, "rope_theta": 5000.0, **layer}
        said[IDS] = None if ids is None else list(ids)
    else:
        said |= layer
    if dialect == "sglang":
        said["eagle_config"] = None if ids is None else {IDS: [i - 1 for i in ids]}
        if variant == "borrowed head":
            said["draft_vocab_size"] = None
    return write(folder, dialect, tensors=tensors, **said)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    file = folder / "pytorch_model.bin"
    return torch.load(file, weights_only=True) if file.is_file() else load_file(folder / "model.safetensors")


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "eyas_conversion.json").read_text())


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (other[name].dtype, other[name].shape) == (value.dtype, value.shape), name
        assert other[name].reshape(-1).view(torch.uint8).equal(value.reshape(-1).view(torch.uint8)), name


@torch.no_grad()
def computed(folder: Path) -> list[torch.Tensor]:
    """What Eyas computes with the drafter in ``folder``: two steps over five slots, and the tokens it may propose."""
    width = read(Checkpoint.open(folder)).config.target_hidden_size
    model = load(folder, target_hidden_size=width)
    if width == H:
        model.bind(noise((V, H), 8), noise((V, H), 9))
    states = model.fuse(noise((1, 5, model.config.num_aux * width), 7))
    first = model(model.embed(torch.arange(5)[None]), states, torch.arange(5)[None])
    second = model(model.embed(torch.arange(1, 6)[None]), first.next_hidden, torch.arange(1, 6)[None])
    return [
        model.logits(first.normed),
        model.logits(second.normed),
        model.draft_to_target,
        torch.tensor(model.aux_layer_ids),
    ]


@pytest.mark.parametrize(("variant", "one", "other"), PAIRS)
def test_there_and_back(tmp_path: Path, variant: str, one: str, other: str) -> None:
    source = drafter(tmp_path / "source", one, variant)
    there, back = tmp_path / "there", tmp_path / "back"
    target = TARGET if other == "eagle" else None  # explicit layers, which are this target's default ones
    if variant == "another width":
        target = Verifier("m", (), 24, V, 10, 4096) if target else None
    convert(source, other, there, target=target)
    convert(there, one, back)
    assert_same_bits(tensors(there), tensors(drafter(tmp_path / "by hand", other, variant)))
    assert_same_bits(tensors(back), tensors(source))
    first, second, third = (read(Checkpoint.open(folder)) for folder in (source, there, back))
    assert (first.dialect, second.dialect, third.dialect) == (one, other, one)
    for outputs in (computed(there), computed(back)):
        assert all(torch.equal(a, b) for a, b in zip(outputs, computed(source), strict=True))
    if other != "eagle" and one != "eagle":
        changed = {"dialect"}
        assert {k: v for k, v in vars(third.config).items() if k not in changed} == {
            k: v for k, v in vars(first.config).items() if k not in changed
        }


def test_what_each_dialect_gets(tmp_path: Path) -> None:
    """By the keys that the engines' own readers look for."""
    source = drafter(tmp_path / "s", "sglang")
    done = convert(source, "vllm", tmp_path / "v", target=TARGET)
    said = config(tmp_path / "v")
    assert "model_type" not in said  # or vLLM does not see a speculators config
    assert (said[IDS], said["draft_vocab_size"], said["target_hidden_size"]) == ([2, 5, 7], D, H)
    assert [said[key] for key in ("norm_before_residual", "fc_norm", "norm_before_fc", "norm_output")] == [False] * 4
    plan = said["speculators_config"]
    assert plan["verifier"] == {"name_or_path": "some/model", "architectures": ["LlamaForCausalLM"]}
    assert plan["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 5}]
    assert said["transformer_layer_config"]["max_position_embeddings"] == 8192
    assert {name for name in tensors(tmp_path / "v") if name.startswith("layers.0.")}
    assert (done.dialects, done.tensors) == (("sglang", "vllm"), 15)

    convert(tmp_path / "v", "sglang", tmp_path / "back")
    said = config(tmp_path / "back")
    assert said["architectures"] == ["LlamaForCausalLMEagle3"]
    assert said["eagle_config"] == {IDS: [1, 4, 6], "use_aux_hidden_state": True}
    assert said["draft_vocab_size"] == D

    convert(tmp_path / "v", "eagle", tmp_path / "e", target=TARGET)
    said = config(tmp_path / "e")
    assert (said["architectures"], said["num_hidden_layers"]) == (["LlamaForCausalLM"], 1)
    assert "target_hidden_size" not in said  # or it would no longer take the target's embedding
    assert "eagle_config" not in said
    assert IDS not in said


@pytest.mark.parametrize("dialect", RECENT)
@pytest.mark.parametrize("variant", ["reduced", "linear rope", "llama3 rope", "yarn"])
def test_transformers_reads_the_rope_that_was_written(tmp_path: Path, dialect: str, variant: str) -> None:
    """Both spellings stand in the file; transformers 5, on which the engines build, must end with one meaning."""
    source = drafter(tmp_path / "s", "sglang", variant)
    convert(source, dialect, tmp_path / "out")
    said = config(tmp_path / "out")
    llama = AutoConfig.for_model(**said.get("transformer_layer_config", said))
    wanted = dict(read(Checkpoint.open(source)).config.rope)
    assert {key: llama.rope_parameters.get(key) for key in wanted} == wanted


def test_names_of_other_kinds_are_read(tmp_path: Path) -> None:
    """Prefixes, older norm names, buffers, shards and maps beside the weights."""
    plain = tensors(drafter(tmp_path / "plain", "vllm"))
    prefixed = {f"model.{name}": value for name, value in plain.items()} | {"model.rotary_emb.inv_freq": noise((4,))}
    source = drafter(tmp_path / "prefixed", "vllm")
    save_file(prefixed, source / "model.safetensors")
    done = convert(source, "vllm", tmp_path / "out")
    assert_same_bits(tensors(tmp_path / "out"), plain)
    assert record(tmp_path / "out")["dropped"] == {"model.rotary_emb.inv_freq": "a buffer, not a weight"}
    assert ("tensor names", "model.layers.0.*", "layers.0.*") in [(c.what, c.before, c.after) for c in done.changes]

    shard(drafter(tmp_path / "shards", "sglang"))
    convert(tmp_path / "shards", "vllm", tmp_path / "whole")
    assert_same_bits(tensors(tmp_path / "whole"), plain)

    beside = write(tmp_path / "beside", "vllm", without=("d2t", "t2d"), norm_before_residual=False)
    maps_as_npy(beside)
    convert(beside, "vllm", tmp_path / "inside")
    assert_same_bits(tensors(tmp_path / "inside"), plain)


def test_maps_are_written_where_they_say_something(tmp_path: Path) -> None:
    head = {"lm_head.weight": noise((V, H)), "d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V).bool()}
    always = write(tmp_path / "always", tensors=head, draft_vocab_size=V)
    done = convert(always, "vllm", tmp_path / "v")
    assert not {"d2t", "t2d"} & tensors(tmp_path / "v").keys()
    assert ("vocabulary maps", "d2t, t2d", "none") in [(c.what, c.before, c.after) for c in done.changes]
    assert set(record(tmp_path / "v")["dropped"]) == {"d2t", "t2d"}
    assert done.d2t_sha256 is None

    derived = convert(write(tmp_path / "half", without=("t2d",)), "vllm", tmp_path / "d")
    assert tensors(tmp_path / "d")["t2d"].nonzero().flatten().tolist() == [i * 3 + 1 for i in range(D)]
    assert record(tmp_path / "d")["tensors"]["t2d"]["from"] == "computed from d2t"
    again = convert(tmp_path / "d", "sglang", tmp_path / "s")
    assert again.d2t_sha256 == derived.d2t_sha256 == record(tmp_path / "s")["d2t_sha256"]


def test_a_tied_head_is_written_out_where_nobody_ties(tmp_path: Path) -> None:
    none = ("lm_head.weight", "d2t", "t2d")
    said = {"without": none, "draft_vocab_size": V, "tie_word_embeddings": True}
    own = write(tmp_path / "own", tensors={"embed_tokens.weight": noise((V, H))}, **said)
    for dialect in ("vllm", "eagle"):
        convert(own, dialect, tmp_path / dialect, target=TARGET)
        assert torch.equal(tensors(tmp_path / dialect)["lm_head.weight"], noise((V, H)))
        assert torch.equal(computed(tmp_path / dialect)[1], computed(own)[1])
    with pytest.raises(CheckpointError, match="vLLM knows no tied head"):
        convert(write(tmp_path / "borrowed", **said), "vllm", tmp_path / "x")


def test_the_target_raises_positions_and_never_lowers_them(tmp_path: Path) -> None:
    source = drafter(tmp_path / "s", "sglang", "yarn")
    convert(source, "sglang", tmp_path / "far", target=TARGET)
    assert config(tmp_path / "far")["max_position_embeddings"] == 8192
    assert config(tmp_path / "far")["rope_scaling"]["original_max_position_embeddings"] == 64
    short = Verifier("m", (), H, V, 10, 128)
    convert(source, "sglang", tmp_path / "same", target=short)
    assert config(tmp_path / "same")["max_position_embeddings"] == 4096
    with pytest.raises(CheckpointError, match="made for a target of hidden size 32, other has 48"):
        convert(source, "sglang", tmp_path / "x", target=Verifier("other", (), 48, V, 10, 128))


def test_the_record_says_where_everything_came_from(tmp_path: Path) -> None:
    source = drafter(tmp_path / "the-source", "eagle")
    convert(source, "sglang", tmp_path / "out", target=TARGET)
    said = record(tmp_path / "out")
    assert said["source"]["folder"] == "the-source"
    assert said["source"]["config"] == config(source)
    assert str(tmp_path) not in json.dumps(said)  # folders get published
    origins = {key: (entry["value"], entry["from"]) for key, entry in said["config"].items()}
    assert origins["hidden_size"] == (H, "config.json: hidden_size")
    assert origins["rope_parameters.rope_theta"] == (5000.0, "config.json: rope_theta")
    assert origins["num_hidden_layers"] == (1, "the tensors")
    assert origins["max_position_embeddings"] == (8192, "the target's config.json")
    assert origins["architectures"] == (["LlamaForCausalLMEagle3"], "the dialect")
    assert origins["bos_token_id"] == (1, "config.json: bos_token_id")
    name = "midlayer.mlp.up_proj.weight"
    held = said["tensors"][name]
    assert (held["from"], held["file"]) == (name, "pytorch_model.bin")
    assert all(len(entry["sha256"]) == 64 for entry in said["tensors"].values())


REFUSED: dict[str, tuple[str, Any, str, str]] = {
    "residual": ("vllm", {"norm_before_residual": True}, "sglang", "no norm_before_residual"),
    "q/k norms": (
        "vllm",
        {
            "tensors": {f"layers.0.self_attn.{x}_norm.weight": noise((8,)) for x in "qk"},
            "transformer_layer_config": {**LLAMA, "model_type": "qwen3"},
            "norm_before_residual": False,
        },
        "sglang",
        "q_norm and k_norm, and drops their weights",
    ),
    "biases": (
        "vllm",
        {
            "tensors": {f"layers.0.self_attn.{x}_proj.bias": noise((16 if x in "kv" else 32,)) for x in "qkvo"},
            "transformer_layer_config": {**LLAMA, "attention_bias": True},
            "norm_before_residual": False,
        },
        "sglang",
        "no attention bias",
    ),
    "no fc": (
        "sglang",
        {"without": ("fc.weight",), "num_aux_hidden_states": 1, "eagle_config": {IDS: [7]}},
        "vllm",
        "always applies fc",
    ),
    "other order": (
        "sglang",
        VARIANTS["other order"][1],
        "vllm",
        "vLLM refuses d2t where the draft vocabulary is as large as the target's",
    ),
    "chosen layers": ("sglang", {"eagle_config": {IDS: [0, 3, 8]}}, "eagle", r"those entering \[1, 4, 9\]"),
    "borrowed head": (
        "sglang",
        {"without": ("lm_head.weight", "d2t", "t2d"), "draft_vocab_size": None},
        "eagle",
        "starts from random numbers",
    ),
    "norms": (
        "sglang",
        {"tensors": fc_norms(), "fc_norm": True, "norm_output": True},
        "eagle",
        "no fc_norm, norm_output",
    ),
    "rope": ("sglang", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "eagle", "'linear' with rope_theta 5000"),
    "two layers": (
        "sglang",
        {"tensors": second_layer("hidden_norm"), "num_hidden_layers": 2},
        "eagle",
        "has one layer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_destination_cannot_run_is_refused(tmp_path: Path, name: str) -> None:
    dialect, changes, to, expected = REFUSED[name]
    source = write(tmp_path / "source", dialect, **changes)
    with pytest.raises(CheckpointError, match=expected):
        convert(source, to, tmp_path / "out", target=TARGET if name != "chosen layers" else None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_all_reasons_are_given_at_once(tmp_path: Path) -> None:
    source = drafter(tmp_path / "source", "vllm", "residual, q/k norms, biases")
    with pytest.raises(CheckpointError, match=r"(?s)cannot be written for sglang.*no norm_before.*q_norm.*bias"):
        convert(source, "sglang", tmp_path / "out")


def test_an_unsound_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"norm.weight: expected"):
        convert(write(tmp_path / "source", without=("norm.weight",)), "vllm", tmp_path / "out")
    with pytest.raises(CheckpointError, match="no such file"):
        convert(tmp_path / "nothing", "vllm", tmp_path / "out")
    with pytest.raises(UsageError, match="no dialect 'gguf'"):
        convert(tmp_path / "source", "gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# The two drafter classes of SGLang as far as the rule reads them: 0.5.9 builds self.midlayer alone and refuses
# num_hidden_layers != 1 (srt/models/llama_eagle3.py:141,198); 0.5.23 builds a stack and reads the flags (:202 and on).
OLD = {"sglang/srt/models/llama_eagle3.py": "self.midlayer = Layer(config, 0)\nif config.num_hidden_layers != 1: raise"}
NEW = {
    "sglang/srt/models/llama_eagle3.py": 'for i in range(config.num_hidden_layers)\ngetattr(config, "fc_norm")\n'
    '"norm_output" "norm_before_fc" "num_aux_hidden_states"'
}


def test_an_old_engine_lacks_what_its_dialect_can_say(tmp_path: Path) -> None:
    layered = drafter(tmp_path / "layers", "sglang", "two layers")
    with pytest.raises(CheckpointError, match="of this engine builds one layer, this drafter has 2"):
        convert(layered, "sglang", tmp_path / "x", engine=OLD.get)
    convert(layered, "sglang", tmp_path / "fine", engine=NEW.get)
    normed = drafter(tmp_path / "norms", "sglang", "3.1 norms")
    with pytest.raises(CheckpointError, match=r"(?s)does not know fc_norm.*does not know norm_output"):
        convert(normed, "sglang", tmp_path / "x", engine=OLD.get)
    convert(normed, "sglang", tmp_path / "also", engine=NEW.get)
    four = read(Checkpoint.open(drafter(tmp_path / "four", "sglang", "four states"))).config
    assert limits(four, "sglang", OLD.get) and not limits(four, "sglang", NEW.get)
    with pytest.raises(UsageError, match="it is not vllm, or too old"):
        limits(four, "vllm", NEW.get)


def test_notes_say_what_the_destination_makes_of_it(tmp_path: Path) -> None:
    own = drafter(tmp_path / "own", "vllm", "own embedding")
    assert any("in place of embed_tokens.weight" in note for note in convert(own, "sglang", tmp_path / "1").notes)
    short = write(tmp_path / "short", max_position_embeddings=2048, eagle_config={IDS: [2, 30, 58]})
    notes = convert(short, "vllm", tmp_path / "2").notes
    assert any("stays 2048" in note for note in notes)
    assert any("the file cannot tell which convention" in note for note in notes)
    assert any("the config names no target" in note for note in notes)
    assert convert(drafter(tmp_path / "s", "sglang"), "vllm", tmp_path / "3", target=TARGET).notes == ()


def test_reading_a_target(tmp_path: Path) -> None:
    inner = {"hidden_size": 32, "vocab_size": 64, "num_hidden_layers": 10, "max_position_embeddings": 4096}
    wrapped = {"architectures": ["W"], "vision_config": {"hidden_size": 9}, "thinker": {"text_config": inner}}
    (tmp_path / "config.json").write_text(json.dumps(wrapped))
    assert Verifier.read(tmp_path) == Verifier(str(tmp_path), ("W",), 32, 64, 10, 4096)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": "32"}))
    with pytest.raises(CheckpointError, match="names no hidden_size"):
        Verifier.read(tmp_path)
    with pytest.raises(CheckpointError, match=r"a target is a folder with config.json"):
        Verifier.read(tmp_path / "nothing")


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    source, out = drafter(tmp_path / "source", "sglang"), tmp_path / "out"
    out.mkdir()
    convert(source, "vllm", out)  # an empty folder is free
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match="exists already; --force replaces it"):
        convert(source, "sglang", out)
    assert (out / "model.safetensors").read_bytes() == before
    convert(source, "sglang", out, force=True)
    assert config(out)["architectures"] == ["LlamaForCausalLMEagle3"]
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds notes\.txt, which is not of a conversion"):
        convert(source, "vllm", out, force=True)
    for place in (source, tmp_path):
        with pytest.raises(UsageError, match="holds the source"):
            convert(source, "vllm", place, force=True)
    with pytest.raises(UsageError, match="exists and is not a folder"):
        convert(source, "vllm", source / "config.json", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = drafter(tmp_path / "source", "sglang"), tmp_path / "out"
    convert(source, "vllm", out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.weights, "write", full)
    with pytest.raises(CheckpointError, match=r"cannot be written: .*No space left"):
        convert(source, "sglang", out, force=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    monkeypatch.undo()
    rename = Path.rename

    def stubborn(self: Path, new: Path) -> Path:
        if self.name == "new":
            raise OSError(5, "Input/output error")
        return rename(self, new)

    monkeypatch.setattr(Path, "rename", stubborn)
    with pytest.raises(CheckpointError, match="Input/output error"):
        convert(source, "sglang", out, force=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_file_limit_stops_it_cleanly(tmp_path: Path) -> None:
    """A real write error in the middle of the weights, through the command line."""
    source = drafter(tmp_path / "source", "sglang")
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); "
        "from eyas.cli.main import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "convert", str(source), str(tmp_path / "out"), "--to", "vllm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "cannot be written" in done.stderr and "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


SLOW = """
import sys, time
from pathlib import Path
from eyas.drafter.checkpoint import Checkpoint
from eyas.drafter.convert import convert

raw, count = Checkpoint.raw, 0
def slow(self, name):
    global count
    count += 1
    if count == 5:
        Path(sys.argv[3]).touch()
        time.sleep(60)
    yield from raw(self, name)

Checkpoint.raw = slow
convert(sys.argv[1], "vllm", sys.argv[2])
"""


def test_a_kill_leaves_no_half_folder(tmp_path: Path) -> None:
    source, out, flag = drafter(tmp_path / "source", "sglang"), tmp_path / "out", tmp_path / "flag"
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(source), str(out), str(flag)])
    try:
        while not flag.exists():
            assert process.poll() is None
            time.sleep(0.05)
        assert not out.exists()
        convert(source, "sglang", out)  # at the same time: neither disturbs the other
        parts = list(tmp_path.glob(".out.part-*"))
        assert len(parts) == 1
        assert not (parts[0] / "new" / "model.safetensors").stat().st_size > 80_000
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert config(out)["architectures"] == ["LlamaForCausalLMEagle3"]
    convert(source, "vllm", out, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flag", "out", "source"]  # what was left is gone


def test_no_torch_for_safetensors(tmp_path: Path) -> None:
    source = drafter(tmp_path / "source", "sglang", "low and mixed precision")
    code = (
        "import sys; from eyas.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    command = [sys.executable, "-c", code, "convert", str(source), str(tmp_path / "out"), "--to", "vllm"]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    assert "midlayer.* -> layers.0.*" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert tensors(tmp_path / "out")["fc.weight"].dtype == torch.bfloat16


def test_the_layout_is_that_of_the_safetensors_library(tmp_path: Path) -> None:
    source = drafter(tmp_path / "source", "sglang")
    convert(source, "sglang", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == _written_by_the_library(tmp_path, tensors(source))
    first = Checkpoint.open(tmp_path / "out")
    assert all(np.fromfile(t.file, "u1", t.nbytes, offset=t.start).nbytes == t.nbytes for t in first.tensors.values())


def _written_by_the_library(folder: Path, held: dict[str, torch.Tensor]) -> bytes:
    save_file(held, folder / "theirs.safetensors", {"format": "pt"})
    return (folder / "theirs.safetensors").read_bytes()


def test_a_result_that_reads_differently_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should a writer and its reader ever disagree, nothing is written."""
    real = module.writing.config_json
    monkeypatch.setattr(module.writing, "config_json", lambda *a: real(*a) | {"norm_output": True})
    with pytest.raises(Exception, match="the result would not be the same drafter"):
        convert(drafter(tmp_path / "source", "sglang"), "sglang", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = str(drafter(tmp_path / "s", "vllm")), str(tmp_path / "out")
    (tmp_path / "target").mkdir()
    sizes = {"hidden_size": H, "vocab_size": V, "num_hidden_layers": 10, "max_position_embeddings": 8192}
    (tmp_path / "target" / "config.json").write_text(json.dumps(sizes))

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["convert", *args])
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out, printed.err

    code, shown, _ = run(source, out, "--to", "eagle", "--target", str(tmp_path / "target"), "--json")
    assert code == 0
    assert json.loads(shown)["dialects"] == ["vllm", "eagle"]
    code, _, error = run(source, out, "--to", "sglang")
    assert (code, "--force replaces it" in error) == (2, True)
    assert run(source, out, "--to", "sglang", "--force")[0] == 0
    code, _, error = run(source, str(tmp_path / "x"), "--to", "eagle")
    assert (code, "say which target it is" in error) == (1, True)
    assert run(source, str(tmp_path / "x"), "--to", "gguf")[0] == 2
    assert run(source, str(tmp_path / "x"), "--to", "vllm", "--engine-path", str(tmp_path / "none"))[0] == 2
    layered, engine = drafter(tmp_path / "layered", "sglang", "two layers"), write_engine(tmp_path / "engine", SGLANG)
    code, _, error = run(str(layered), str(tmp_path / "x"), "--to", "sglang", "--engine-path", str(engine))
    assert (code, "builds one layer, this drafter has 2" in error) == (1, True)
    assert not (tmp_path / "x").exists()


def test_what_was_done_is_reported(tmp_path: Path) -> None:
    done: Conversion = convert(drafter(tmp_path / "s", "vllm"), "sglang", tmp_path / "out")
    changed = {change.what: (change.before, change.after) for change in done.changes}
    assert changed["layer ids"] == ("[2, 5, 7] (entry ids, top level)", "[1, 4, 6] (output ids, eagle_config)")
    assert changed["tensor names"] == ("layers.0.*", "midlayer.*")
    assert changed["architecture"] == ("Eagle3Speculator", "LlamaForCausalLMEagle3")
    assert all(change.why for change in done.changes)
