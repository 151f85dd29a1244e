"""Everything that can be wrong with a drafter's files: one clear error each, before anything is built."""

from __future__ import annotations

import json
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from drafter.folders import CHOSEN, IDS, LLAMA, TARGET, D, H, V, noise, shard, weights, write
from safetensors.torch import save_file

from eyas.core import CheckpointError
from eyas.drafter.storage import load_drafter


def error(path: Path, **changes: object) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_drafter(path, **{**TARGET, "dtype": torch.float32, **changes})
    message = str(caught.value)
    assert len(message.splitlines()) <= 12
    return message


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: missing"),
    "config not JSON": (lambda f: (f / "config.json").write_text("{'a': 1}"), "config.json: not valid JSON"),
    "config not text": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), "config.json: not valid JSON"),
    "config a list": (lambda f: (f / "config.json").write_text("[1]"), "expected a JSON object, found list"),
    "config nested": (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json: not valid JSON"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "found no weights"),
    "truncated": (lambda f: cut(f, -100), "found .*: truncated or damaged"),
    "no values": (lambda f: cut(f, 2000), "truncated or damaged"),
    "half a header": (lambda f: cut(f, 500), "its header claims .* bytes, the file has 500"),
    "empty": (lambda f: cut(f, 0), "the file has 0"),
    "trailing bytes": (lambda f: append(f, b"more"), "truncated or damaged"),
    "huge header": (lambda f: header(f, b"{}", length=2**62), "its header claims 4611686018427387904 bytes"),
    "header not JSON": (lambda f: header(f, b"{nonsense}"), "header cannot be read"),
    "header a list": (lambda f: header(f, b"[1, 2]"), "header cannot be read"),
    "unknown type": (lambda f: entry(f, dtype="F4"), " is of type F4; a drafter's are BOOL, U8"),
    "type a list": (lambda f: entry(f, dtype=["F16"]), "header cannot be read: TypeError"),
    "bytes disagree": (lambda f: entry(f, shape=[3]), r"a: F32 \[3\] takes 12 bytes, its header entry spans 0..8"),
    "negative size": (lambda f: entry(f, shape=[-1, -2]), "its header entry spans"),
    "offsets a word": (lambda f: entry(f, data_offsets="ab"), "header cannot be read"),
}


def cut(folder: Path, size: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])


def append(folder: Path, more: bytes) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes() + more)


def header(folder: Path, content: bytes, length: int | None = None) -> None:
    size = len(content) if length is None else length
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", size) + content + bytes(8))


def entry(folder: Path, **changes: object) -> None:
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}
    header(folder, json.dumps({"a": tensor}).encode())


@pytest.mark.parametrize("name", FILES)
def test_files(tmp_path: Path, name: str) -> None:
    spoil, expected = FILES[name]
    folder = write(tmp_path)
    spoil(folder)
    message = error(folder)
    assert str(folder) in message
    assert re.search(expected, message), message


def test_no_such_folder(tmp_path: Path) -> None:
    assert "no such file" in error(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    assert "expected a .safetensors or .bin file" in error(tmp_path / "notes.txt")


def test_shards(tmp_path: Path) -> None:
    shard(write(tmp_path))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "names the shard 'model-00002-of-00002.safetensors', which is not in the folder" in error(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    (tmp_path.parent / "elsewhere.safetensors").write_bytes(b"")
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../elsewhere.safetensors"}}))
    assert "which is not in the folder" in error(tmp_path)
    index.write_text("{}")
    assert "expected a weight_map" in error(tmp_path)


class Bomb:
    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("exploded"),))


def test_a_pickle_with_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "eagle")
    torch.save({**weights("eagle"), "x": Bomb()}, tmp_path / "pytorch_model.bin")
    assert "could run code when opened; refused" in error(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(), protocol=2))
    assert "refused" in error(tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_a_broken_bin(tmp_path: Path) -> None:
    file = write(tmp_path, "eagle") / "pytorch_model.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert "pytorch_model.bin: not a whole PyTorch file" in error(tmp_path)
    torch.save({"model": weights("eagle")}, file)
    assert "expected a dictionary of tensors" in error(tmp_path)
    torch.save([1], file)
    assert "expected a dictionary of tensors by name, found list" in error(tmp_path)


def test_an_old_bin_is_read(tmp_path: Path) -> None:
    file = write(tmp_path, "eagle") / "pytorch_model.bin"
    torch.save(weights("eagle"), file, _use_new_zipfile_serialization=False)
    load_drafter(tmp_path, **TARGET, dtype=torch.float32)


def test_a_pickled_map(tmp_path: Path) -> None:
    write(tmp_path, without=("d2t", "t2d"))
    np.save(tmp_path / "d2t.npy", np.array([Bomb()]), allow_pickle=True)
    assert "d2t.npy: not a plain numpy array" in error(tmp_path)


TENSORS: dict[str, tuple[dict, str]] = {
    "missing": ({"without": ("norm.weight",)}, r"norm.weight: expected \[32\], found no such tensor"),
    "several missing": (
        {"without": ("norm.weight", "midlayer.mlp.up_proj.weight")},
        r"(?s)cannot be used here:\n  - .*norm.weight.*\n  - .*layers.0.mlp.up_proj.weight",
    ),
    "extra": ({"tensors": {"gate.weight": noise((3,))}}, r"gate.weight \[3\]: nothing in this drafter uses it"),
    "an unexpected norm": ({"tensors": {"fc_norm.0.weight": noise((H,))}}, "nothing in this drafter uses it"),
    "a missing norm": ({"fc_norm": True}, "fc_norm.0.weight: expected"),
    "a missing layer": ({"num_hidden_layers": 2}, "layers.1.input_layernorm.weight: expected"),
    "shape": (
        {"tensors": {"norm.weight": noise((31,))}},
        r"model.safetensors: norm.weight: expected \[32\] from config.json, found \[31\]",
    ),
    "twice": ({"tensors": {"model.fc.weight": noise((H, 96))}}, "fc.weight and .*fc.weight are the same tensor"),
    "no fc": ({"without": ("fc.weight",)}, "expected fc.weight, found none: this is not an EAGLE-3 drafter"),
    "five states": (
        {"eagle_config": {IDS: [1, 2, 3, 4, 5]}},
        r"fc.weight: expected \[32, 160\] from config.json, found \[32, 96\]",
    ),
    "integers": (
        {"tensors": {"norm.weight": torch.ones(H, dtype=torch.int32)}},
        "expected BF16, F16 or F32, found I32",
    ),
    "no embedding": ({"target_hidden_size": 24}, "so the target's embedding cannot serve"),
    "no head": ({"without": ("lm_head.weight",)}, "no lm_head.weight, and the target's head needs"),
    "no d2t": ({"without": ("d2t", "t2d")}, r"expected d2t \[20\], found none"),
    "short d2t": ({"tensors": {"d2t": CHOSEN[:5]}}, r"d2t: expected \[20\] \(draft_vocab_size\), found \[5\]"),
    "d2t out of range": ({"tensors": {"d2t": CHOSEN + 40}}, "outside 0..63"),
    "d2t of ids": ({"tensors": {"d2t": CHOSEN}}, "seems to hold target ids, not offsets"),
    "d2t all zero": ({"tensors": {"d2t": torch.zeros(D, dtype=torch.int64)}}, "t2d: disagrees with d2t"),
    "d2t not unique": ({"tensors": {"d2t": -torch.arange(D)}}, "map to a target token that another one has already"),
    "d2t of floats": ({"tensors": {"d2t": torch.zeros(D)}}, "d2t: expected I64 or I32, found F32"),
    "t2d of integers": ({"tensors": {"t2d": torch.zeros(V, dtype=torch.int64)}}, "t2d: expected BOOL or U8, found I64"),
    "short t2d": ({"tensors": {"t2d": torch.ones(V - 1, dtype=torch.bool)}}, r"t2d: expected \[64\]"),
    "t2d of another": ({"tensors": {"t2d": torch.arange(V) < D}}, "t2d: disagrees with d2t on"),
}
CONFIGS: dict[str, tuple[dict, str]] = {
    "no hidden size": ({"hidden_size": ...}, "hidden_size: expected a positive integer, found nothing"),
    "words for numbers": ({"vocab_size": "64"}, "vocab_size: expected a positive integer, found '64'"),
    "negative": ({"draft_vocab_size": -1}, "draft_vocab_size: expected a positive integer, found -1"),
    "two at once": ({"hidden_size": 0, "vocab_size": None}, "hidden_size: .*; vocab_size: "),
    "heads": ({"num_key_value_heads": 3}, "4 attention heads do not divide into 3"),
    "draft larger": ({"draft_vocab_size": 65}, "draft_vocab_size exceeds vocab_size 64"),
    "ids not integers": ({"eagle_config": {IDS: [1, "4", 6]}}, "expected a list of integers"),
    "ids not a list": ({"eagle_config": {IDS: 3}}, "expected a list of integers, found 3"),
    "ids repeat": ({"eagle_config": {IDS: [1, 1, 6]}}, "auxiliary layers repeat"),
    "ids and count": ({"num_aux_hidden_states": 4}, "3 auxiliary layer ids for 4 states"),
    "count without ids": ({"eagle_config": {}, "num_aux_hidden_states": 5}, "no layer ids say which 5 states"),
    "eagle_config a list": ({"eagle_config": [1]}, r"eagle_config: expected an object, found \[1\]"),
    "rope type": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope_type 'dynamic' is not one of"),
    "rope key": (
        {"rope_scaling": {"rope_type": "linear"}},
        "RoPE of type 'linear' needs a positive factor, found None",
    ),
    "rope a word": ({"rope_scaling": "linear"}, "rope_scaling: expected an object, found 'linear'"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "latent attention": ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "Eagle3DeepseekV2ForCausalLM is not supp"),
    "EAGLE-1": ({"eagle_config": {"use_aux_hidden_state": False}}, "an EAGLE-1 type drafter"),
    "other family": ({"model_type": "llama4_text"}, "model_type 'llama4_text' is not supported"),
    "parallel": ({"parallel_drafting": True}, r"parallel_drafting is True: parallel drafting \(P-EAGLE\)"),
    "parallel token": ({"pard_token": 5}, "pard_token is 5"),
    "block": ({"dflash_config": {"mask_token_id": 3}}, r"block drafting \(DFlash\)"),
    "no last norm": ({"eagle_config": {"use_last_layernorm": False}}, "a head without the final norm"),
    "soft cap": ({"final_logit_softcapping": 30.0}, "soft-capped logits is not supported"),
    "logit scale": ({"logit_scale": 0.5}, "scaled logits is not supported"),
    "part of the head": ({"partial_rotary_factor": 0.5}, "rotating only a part of each head"),
    "sliding window": ({"layer_types": ["sliding_attention"]}, "a sliding-window drafter is not supported"),
}


@pytest.mark.parametrize("name", [*TENSORS, *CONFIGS])
def test_contents(tmp_path: Path, name: str) -> None:
    changes, expected = {**TENSORS, **CONFIGS}[name]
    folder = write(tmp_path, **changes)
    message = error(folder)
    assert re.search(expected, message), message
    assert str(folder) in message


@pytest.mark.parametrize("kind", ["peagle", "dflash", "mlp"])
def test_other_speculators(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path, "vllm", speculators_model_type=kind)
    assert f"speculators model type {kind!r} is not supported" in error(folder)


def test_a_config_of_junk_that_means_nothing_loads(tmp_path: Path) -> None:
    junk = {"pretraining_tp": 1, "use_cache": True, "torch_dtype": "bfloat16", "logit_scale": 1.0, "mlp_bias": False}
    load_drafter(write(tmp_path, **junk), **TARGET, dtype=torch.float32)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ({"target_hidden_size": 48}, "made for a target of hidden size 32, this target's is 48"),
        ({"target_vocab_size": 100}, "made for a target of vocabulary size 64, this target's is 100"),
        ({"num_target_layers": 5}, r"entry ids \[2, 5, 7\] \(output ids \[1, 4, 6\]\), but this target has 5 layers"),
    ],
)
def test_the_wrong_target(tmp_path: Path, target: dict, expected: str) -> None:
    assert re.search(expected, error(write(tmp_path), **target))


def test_a_shallow_target_has_no_default(tmp_path: Path) -> None:
    assert "not three ascending layers for a target of n = 6" in error(write(tmp_path, "eagle"), num_target_layers=6)


def test_layers_in_the_other_convention_can_be_given(tmp_path: Path) -> None:
    folder = write(tmp_path / "one", eagle_config={IDS: [2, 5, 11]})
    assert "give aux_layer_ids" in error(folder)
    model = load_drafter(folder, **TARGET, dtype=torch.float32, aux_layer_ids=(2, 5, 10))
    assert model.aux_layer_ids == (2, 5, 10)
    # gpt-oss drafters: entry ids where output ids belong, which the last one gives away
    folder = write(tmp_path / "other", eagle_config={IDS: [2, 5, 10]})
    assert load_drafter(folder, **TARGET, dtype=torch.float32).aux_layer_ids == (2, 5, 10)
    assert "4 auxiliary layer ids for 3 states" in error(folder, aux_layer_ids=(1, 2, 3, 4))


def test_everything_at_once_fits_a_screen(tmp_path: Path) -> None:
    lost = tuple(name for name in weights() if "midlayer" in name)
    message = error(write(tmp_path, without=lost), target_vocab_size=3, target_hidden_size=5, num_target_layers=1)
    assert "and 5 more" in message


def test_a_whole_model_is_not_a_drafter(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    save_file({"model.layers.0.mlp.up_proj.weight": noise((48, H))}, tmp_path / "model.safetensors")
    assert "not an EAGLE-3 drafter" in error(tmp_path)
