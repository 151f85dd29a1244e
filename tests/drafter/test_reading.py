"""Every dialect, read from files that this test wrote: same weights, same drafter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drafter.folders import CHOSEN, IDS, KV, LLAMA, TARGET, D, H, V, maps, maps_as_npy, noise, shard, weights, write

from eyas.core import CheckpointError, UsageError
from eyas.drafter.checkpoint import Checkpoint
from eyas.drafter.dialects import read
from eyas.drafter.model import Eagle3Model, untrained
from eyas.drafter.storage import load_drafter, save

DIALECTS = ("eagle", "sglang", "vllm")


def load(folder: Path, **changes: object) -> Eagle3Model:
    return load_drafter(folder, **{**TARGET, "dtype": torch.float32, **changes})


def assert_same(one: Eagle3Model, other: Eagle3Model) -> None:
    left, right = one.state_dict(), other.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_is_read(tmp_path: Path, dialect: str) -> None:
    model = load(write(tmp_path, dialect))
    config, held = model.config, weights(dialect)
    first = "layers.0." if dialect == "vllm" else "midlayer."
    qkv = torch.cat([held[f"{first}self_attn.{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(model.layers[0].self_attn.qkv_proj.weight, qkv)
    assert torch.equal(model.layers[0].hidden_norm.weight, held[first + "hidden_norm.weight"])
    assert torch.equal(model.layers[0].input_layernorm.weight, held[first + "input_layernorm.weight"])
    assert torch.equal(model.lm_head.weight, held["lm_head.weight"])
    assert torch.equal(model.draft_to_target, CHOSEN)
    assert model.aux_layer_ids == (2, 5, 7)
    assert config.dialect == dialect
    assert config.norm_before_residual == (dialect == "vllm")
    assert (config.num_hidden_layers, config.rms_norm_eps, config.head_dim) == (1, 1e-5, 8)
    assert dict(config.rope) == {"rope_type": "default", "rope_theta": 5000.0}
    assert not config.own_embedding
    assert not model.training


def test_dialects_hold_the_same_drafter(tmp_path: Path) -> None:
    models = [load(write(tmp_path / dialect, dialect)) for dialect in DIALECTS]
    assert_same(models[0], models[1])
    assert_same(models[0], models[2])


def test_dtype_and_file_path(tmp_path: Path) -> None:
    write(tmp_path)
    model = load(tmp_path / "model.safetensors", dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.draft_to_target.dtype == torch.int64


def test_shards_and_other_names(tmp_path: Path) -> None:
    whole = load(write(tmp_path / "whole"))
    shard(write(tmp_path / "shards"))
    assert_same(load(tmp_path / "shards"), whole)
    (write(tmp_path / "named") / "model.safetensors").rename(tmp_path / "named" / "drafter.safetensors")
    assert_same(load(tmp_path / "named"), whole)
    prefixed = {f"model.{k}": v for k, v in weights().items()}
    assert_same(load(write(tmp_path / "prefix", tensors=prefixed, without=tuple(weights()))), whole)


def test_maps_beside_the_weights(tmp_path: Path) -> None:
    folder = write(tmp_path, "vllm", without=("d2t", "t2d"))
    maps_as_npy(folder)
    assert torch.equal(load(folder).draft_to_target, CHOSEN)


def test_t2d_may_be_missing(tmp_path: Path) -> None:
    assert torch.equal(load(write(tmp_path, without=("t2d",))).draft_to_target, CHOSEN)


def test_full_vocabulary(tmp_path: Path) -> None:
    head = {"lm_head.weight": noise((V, H))}
    model = load(write(tmp_path / "none", tensors=head, without=("d2t", "t2d"), draft_vocab_size=V))
    assert model.draft_to_target.tolist() == list(range(V))
    always = {**head, "d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    assert_same(load(write(tmp_path / "always", tensors=always, draft_vocab_size=...)), model)


def test_own_embedding_and_borrowed_head(tmp_path: Path) -> None:
    own = load(write(tmp_path / "own", tensors={"embed_tokens.weight": noise((V, H))}))
    assert torch.equal(own.embed(torch.arange(V)), noise((V, H)))
    none = ("lm_head.weight", "d2t", "t2d")
    borrowing = load(write(tmp_path / "borrow", without=none, draft_vocab_size=None))
    assert not borrowing.config.own_head
    assert not borrowing.config.tied_head
    tied = load(write(tmp_path / "tied", without=none, draft_vocab_size=None, tie_word_embeddings=True))
    assert tied.config.tied_head


def test_another_target_width(tmp_path: Path) -> None:
    tensors = {"fc.weight": noise((H, 3 * 24)), "embed_tokens.weight": noise((V, H))}
    model = load(write(tmp_path, tensors=tensors, target_hidden_size=24), target_hidden_size=24)
    assert model.fuse(torch.randn(1, 2, 72)).shape == (1, 2, H)


def test_norms_under_both_names(tmp_path: Path) -> None:
    new = {f"fc_norm.{i}.weight": noise((H,), number=i) for i in range(3)}
    old = {f"aux_norm_{level}.weight": noise((H,), number=i) for i, level in enumerate(("low", "mid", "high"))}
    one = load(write(tmp_path / "new", tensors=new, fc_norm=True, norm_output=True))
    assert one.config.norm_output
    assert_same(load(write(tmp_path / "old", tensors=old, use_aux_norm=True, norm_output=True)), one)
    whole = load(write(tmp_path / "whole", "vllm", tensors={"input_norm.weight": noise((3 * H,))}, norm_before_fc=True))
    assert whole.input_norm is not None
    eagle_config = {IDS: [1, 4, 6], "norm_before_fc": True}
    nested = write(tmp_path / "nested", tensors={"input_norm.weight": noise((3 * H,))}, eagle_config=eagle_config)
    assert load(nested).config.norm_before_fc


def second_layer(attention_norm: str) -> dict[str, torch.Tensor]:
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    shapes = [(32, H), (KV * 8, H), (KV * 8, H), (H, 32)]
    made = {
        f"layers.1.{name}.weight": noise(shape, 5, i) for i, (name, shape) in enumerate(zip(names, shapes, strict=True))
    }
    for i, (name, shape) in enumerate((("gate_proj", (48, H)), ("up_proj", (48, H)), ("down_proj", (H, 48)))):
        made[f"layers.1.mlp.{name}.weight"] = noise(shape, 6, i)
    made["layers.1.post_attention_layernorm.weight"] = noise((H,), 7)
    return {**made, f"layers.1.{attention_norm}.weight": noise((H,), 8)}


def test_two_layers_in_both_spellings(tmp_path: Path) -> None:
    """SGLang norms the input of further layers with hidden_norm, vLLM with input_layernorm."""
    sglang = load(write(tmp_path / "s", tensors=second_layer("hidden_norm"), num_hidden_layers=2))
    nested = {**LLAMA, "num_hidden_layers": 2}
    vllm = write(tmp_path / "v", "vllm", tensors=second_layer("input_layernorm"), transformer_layer_config=nested)
    assert_same(load(vllm), sglang)


def test_qwen3_layer_and_biases(tmp_path: Path) -> None:
    extra = {f"layers.0.self_attn.{name}_norm.weight": noise((8,), number=i) for i, name in enumerate("qk")}
    extra |= {
        f"layers.0.self_attn.{name}_proj.bias": noise((size,)) for name, size in (("q", 32), ("k", 16), ("v", 16))
    }
    extra["layers.0.self_attn.o_proj.bias"] = noise((H,))
    layer = {**LLAMA, "model_type": "qwen3", "attention_bias": True}
    model = load(write(tmp_path, "vllm", tensors=extra, transformer_layer_config=layer))
    assert torch.equal(model.layers[0].self_attn.q_norm.weight, extra["layers.0.self_attn.q_norm.weight"])
    assert model.layers[0].self_attn.qkv_proj.bias.shape == (64,)


@pytest.mark.parametrize(
    ("dialect", "changes", "entry"),
    [
        ("sglang", {}, (2, 5, 7)),
        ("sglang", {"eagle_config": {IDS: [3, 1, 9]}}, (2, 4, 10)),
        ("sglang", {"eagle_config": {IDS: []}}, (2, 5, 7)),
        ("sglang", {"eagle_config": ...}, (2, 5, 7)),
        ("sglang", {"eagle_config": ..., IDS: [1, 4, 6]}, (1, 4, 6)),
        ("sglang", {IDS: [1, 4, 6]}, (2, 5, 7)),
        ("vllm", {IDS: [0, 4, 10]}, (0, 4, 10)),
        ("vllm", {IDS: None}, (2, 5, 7)),
        ("eagle", {}, (2, 5, 7)),
    ],
)
def test_layer_ids_become_entry_ids(tmp_path: Path, dialect: str, changes: dict, entry: tuple[int, ...]) -> None:
    assert load(write(tmp_path, dialect, **changes)).aux_layer_ids == entry


def test_a_known_convention_replaces_the_files(tmp_path: Path) -> None:
    assert load(write(tmp_path), aux_layer_ids=(6, 1, 4)).aux_layer_ids == (1, 4, 6)


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"rope_theta": 7.0, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 7.0}),
        ({"rope_theta": ...}, {"rope_type": "default", "rope_theta": 10000.0}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0},
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 7.0}}},
            {"rope_type": "default", "rope_theta": 7.0},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 4096},
        ),
        (
            {"rope_scaling": {"rope_type": "default", "type": "mrope", "mrope_section": [1, 1, 2]}},
            {"rope_type": "default", "rope_theta": 5000.0},
        ),
    ],
)
def test_rope_in_every_spelling(tmp_path: Path, keys: dict, rope: dict) -> None:
    assert dict(read(Checkpoint.open(write(tmp_path, **keys))).config.rope) == rope


@pytest.mark.parametrize(
    ("dialect", "changes", "recognised"),
    [
        ("eagle", {}, "eagle"),
        ("eagle", {"eagle_config": {IDS: [1, 4, 6]}}, "sglang"),
        ("eagle", {"architectures": ["Eagle3LlamaForCausalLM"]}, "vllm"),
        ("eagle", {IDS: [2, 5, 7]}, "vllm"),
        ("sglang", {}, "sglang"),
        ("vllm", {}, "vllm"),
    ],
)
def test_recognition(tmp_path: Path, dialect: str, changes: dict, recognised: str) -> None:
    reading = read(Checkpoint.open(write(tmp_path, dialect, **changes, num_hidden_layers=1)))
    assert reading.dialect == recognised
    assert reading.evidence
    assert reading.config.norm_before_residual == (dialect == "vllm")


def test_missing_norm_before_residual_is_true_for_speculators_only(tmp_path: Path) -> None:
    assert load(write(tmp_path / "v", "vllm", norm_before_residual=...)).config.norm_before_residual
    assert not load(write(tmp_path / "s")).config.norm_before_residual


@pytest.mark.parametrize("dialect", DIALECTS)
def test_saving_and_loading_again(tmp_path: Path, dialect: str) -> None:
    model = load(write(tmp_path / "in", dialect, norm_before_residual=False))
    save(model, tmp_path / "out")
    again = load(tmp_path / "out")
    assert_same(again, model)
    assert again.aux_layer_ids == model.aux_layer_ids
    modes = {p.name: p.stat().st_mode for p in (tmp_path / "out").iterdir()}
    assert sorted(modes) == ["config.json", "model.safetensors"] and len(set(modes.values())) == 1


def test_what_is_saved_is_what_sglang_reads(tmp_path: Path) -> None:
    save(load(write(tmp_path / "in")), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"] == {IDS: [1, 4, 6], "use_aux_hidden_state": True}
    assert (config["draft_vocab_size"], config["vocab_size"], config["rope_theta"]) == (D, V, 5000.0)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 5000.0}
    assert "norm_output" not in config
    saved = dict(Checkpoint.open(tmp_path / "out").values(weights()))
    assert saved.keys() == weights().keys()
    assert all(torch.equal(saved[name], value) for name, value in weights().items())


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"draft_vocab_size": 24, "num_hidden_layers": 3, "fc_norm": True, "norm_output": True},
        {"own_head": False},
        {"own_head": False, "tied_head": True},
        {"own_embedding": True, "hidden_size": 16, "norm_before_fc": True, "aux_layer_ids": (0, 1, 5, 8, 10)},
        {"rope": {"rope_type": "yarn", "rope_theta": 7.0, "factor": 2.0, "original_max_position_embeddings": 64}},
    ],
)
def test_every_shape_survives_saving(tmp_path: Path, shape: dict) -> None:
    model = untrained(H, 10, V, seed=1, **shape)
    save(model, tmp_path)
    again = load(tmp_path)
    assert_same(again, model)
    assert again.config == model.config


def test_saving_refuses_what_sglang_has_not(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"(?s)norm_before_residual.*q"):
        save(untrained(H, 10, V, norm_before_residual=True, qk_norm=True), tmp_path / "x")
    with pytest.raises(UsageError, match="dialect 'other'"):
        save(untrained(H, 10, V), tmp_path / "x", dialect="other")
    assert not (tmp_path / "x").exists()


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    write(tmp_path, "sglang")
    code = (
        "import sys; from eyas.drafter.inspect import describe; report = describe(sys.argv[1]); "
        "assert report.problems == () and 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)


def test_maps_are_what_the_files_say(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path))
    assert checkpoint.array("d2t").tolist() == maps()["d2t"].tolist()
    assert checkpoint.array("t2d").tolist() == maps()["t2d"].tolist()
