"""Sizes from configs, against published ones, against transformers' own models, and against drafters' tensors."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eyas.bench.quantization import PLAIN, Format
from eyas.bench.shapes import (
    Experts,
    check_parallel,
    default_drafter,
    drafter_model,
    read_drafter,
    read_target,
    target_model,
)
from eyas.bridges.target import Target
from eyas.core import CheckpointError, TargetError, UsageError
from eyas.drafter.config import Eagle3Config, tensor_shapes

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
}
KIMI = DEEPSEEK | {
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "vocab_size": 163840,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    },
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}


def model(config, **more):
    return target_model(Target(Path("some-model"), config), **more)


# Published sizes: weights in all and for one token, bytes of cache for one token


@pytest.mark.parametrize(
    ("config", "billions", "active", "cache"),
    [
        (LLAMA, 8.03, 8.03 - 0.525, 128 * 1024),  # active leaves out the embedding
        (DEEPSEEK, 671, 37, 576 * 2 * 61),  # DeepSeek-V3: "671B total, 37B activated"
        (KIMI, 1026, 32, 576 * 2 * 61),  # Kimi-K2: "1T total, 32B activated"
        (MIXTRAL, 46.7, 12.9, 128 * 1024),
    ],
)
def test_published_sizes(config, billions, active, cache):
    found = model(config)
    assert found.parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert found.active / 1e9 == pytest.approx(active, rel=0.03)
    assert found.attention.bytes_per_token == cache


def test_kimi_takes_what_its_files_take():
    """Its repository holds 595 GB: experts in 4 bits with a 16-bit scale for 32, all else in 16 bits."""
    found = model({"architectures": ["KimiK25ForConditionalGeneration"], "text_config": KIMI})
    assert found.name == "KimiK25ForConditionalGeneration"
    assert found.bytes / 1e9 == pytest.approx(595, rel=0.01)
    formats = {part.name: part.format for part in found.weights}
    assert formats == dict.fromkeys(["attention", "attention, shared", "mlp", "router", "shared experts"], PLAIN)
    assert found.experts.format == Format(4.5) and found.head.format == PLAIN
    assert model(KIMI, kv_bytes=1.0).attention.bytes_per_token == 576 * 61


# transformers' own models of tiny configs

SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 128}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 24}
TINY = {
    "llama": GROUPED,
    "qwen3": GROUPED | {"tie_word_embeddings": True},
    "gemma3_text": GROUPED | {"num_key_value_heads": 1},
    "mixtral": GROUPED | {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen3_moe": GROUPED
    | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "mlp_only_layers": [1]},
    "qwen2_moe": {"num_key_value_heads": 2, "intermediate_size": 96, "num_experts": 6, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 56, "decoder_sparse_step": 2},
    "gpt_oss": GROUPED | {"num_local_experts": 6, "num_experts_per_tok": 2},
    "deepseek_v3": {"num_key_value_heads": 4, "intermediate_size": 96, "moe_intermediate_size": 40}
    | {"n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    | {"first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 48}
    | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12},
    "phi3": {"num_key_value_heads": 2, "intermediate_size": 96, "pad_token_id": 0},
    "starcoder2": {"num_key_value_heads": 2, "intermediate_size": 96},
}


@pytest.mark.parametrize("kind", TINY)
def test_weights_are_those_of_the_real_model(kind):
    config = AutoConfig.for_model(kind, **SMALL, **TINY[kind])
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(config)
    odd = ("shared_expert_gate", "bias")  # one row, and vectors: left out
    matrices = sum(p.numel() for name, p in real.named_parameters() if p.dim() > 1 and not name.endswith(odd))
    matrices -= sum(p.numel() for name, p in real.named_parameters() if "shared_expert_gate" in name)
    assert model(config.to_dict()).parameters == matrices


def test_windows():
    kinds = ["sliding_attention", "full_attention"] * 16
    found = model(LLAMA | {"layer_types": kinds, "sliding_window": 128}).attention
    assert found.rows(1000) == 16 * 128 + 16 * 1000 and found.rows(100) == 32 * 100
    assert model(LLAMA | {"sliding_window": 128}).attention.rows(1000) == 32 * 128
    assert model(LLAMA | {"sliding_window": 128, "use_sliding_window": False}).attention.rows(1000) == 32_000
    assert model(LLAMA | {"sliding_window": 128, "sliding_window_pattern": 4}).attention.rows(1000) == 24 * 128 + 8000
    assert model(LLAMA | {"sliding_window": 128, "model_type": "gemma2"}).attention.rows(1000) == 16 * 128 + 16_000
    chunked = LLAMA | {"attention_chunk_size": 128, "model_type": "llama4_text"}
    assert model(chunked | {"no_rope_layers": []}).attention.rows(1000) == 24 * 128 + 8000
    assert model(chunked | {"no_rope_layers": [1] * 31 + [0]}).attention.rows(1000) == 31 * 128 + 1000
    with pytest.raises(TargetError, match="which layers have it is not known"):
        model(LLAMA | {"sliding_window": 128, "model_type": "novel"})


# Experts


@pytest.mark.parametrize(("number", "chosen", "tokens"), [(8, 2, 1), (8, 2, 4), (384, 8, 4), (60, 4, 37), (16, 16, 3)])
def test_touched_experts_are_those_of_thrown_tokens(number, chosen, tokens):
    dice, rounds = random.Random(5), 3000
    counts = [
        len({expert for _ in range(tokens) for expert in dice.sample(range(number), chosen)}) for _ in range(rounds)
    ]
    predicted = Experts(number, chosen, 1, 1).touched(tokens)
    spread = (sum((n - sum(counts) / rounds) ** 2 for n in counts) / rounds) ** 0.5
    assert predicted == pytest.approx(sum(counts) / rounds, abs=4 * spread / rounds**0.5 + 1e-9)


def test_touched_experts_grow_to_all_of_them():
    experts = Experts(384, 8, 1, 1)
    touched = [experts.touched(tokens) for tokens in (1, 2, 4, 16, 64, 1024)]
    assert touched == sorted(touched) and touched[0] == pytest.approx(8) and touched[-1] == pytest.approx(384)


# Quantization


def formats(quantization):
    found = model(MIXTRAL | {"quantization_config": quantization})
    return found.weights[0].format, found.experts.format, found.head.format


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, (Format(8, "fp8"), Format(8, "fp8"), PLAIN)),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["self_attn"]},
            (PLAIN, Format(8, "fp8"), PLAIN),
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, (Format(4.125), Format(4.125), PLAIN)),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "lm_head": True}, 3 * (Format(4.25),)),
        (
            {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
            (PLAIN, Format(4.25), PLAIN),
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, (Format(4.5, "fp4"), Format(4.5, "fp4"), PLAIN)),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, (Format(8, "int8"), Format(8, "int8"), PLAIN)),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {
                        "targets": ["re:.*self_attn.*"],
                        "weights": {"num_bits": 8, "type": "float"},
                        "input_activations": {"num_bits": 8},
                    },
                    "b": {
                        "targets": ["re:.*experts.*"],
                        "weights": {"num_bits": 4, "type": "float", "group_size": 16},
                        "input_activations": {"num_bits": 4},
                    },
                },
                "ignore": ["lm_head"],
            },
            (Format(8, "fp8"), Format(4.5, "fp4"), PLAIN),
        ),
    ],
)
def test_quantization_of_each_part(quantization, expected):
    assert formats(quantization) == expected


def test_quantization_by_flag():
    found = model(LLAMA, quantization="fp8")
    assert {part.format for part in found.weights} == {Format(8, "fp8")} and found.head.format == PLAIN
    assert model(LLAMA, quantization="bf16") == model(LLAMA)
    with pytest.raises(UsageError, match="--quantization is one of bf16, fp8"):
        model(LLAMA, quantization="q4_k_m")
    with pytest.raises(UsageError, match="its config says compressed-tensors"):
        model(KIMI, quantization="fp8")


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "aqlm"}, "aqlm"),
        ({}, "no quant_method"),
        ({"quant_method": "gptq"}, "does not say how many bits"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 5}}, "a group that does not say"),
        ({"quant_method": "fp8", "ignore": ["re:("]}, "which is no pattern"),
    ],
)
def test_quantization_that_is_not_understood(quantization, words):
    with pytest.raises(TargetError, match="some-model") as error:
        formats(quantization)
    assert words in str(error.value)


# What cannot be predicted


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "it has no hidden_size"),
        ({"num_attention_heads": 0}, "it has no num_attention_heads"),
        ({"intermediate_size": "wide"}, "it has no intermediate_size"),
        ({"layer_types": ["linear_attention"] * 32}, "layers of type 'linear_attention'"),
        ({"index_topk": 2048}, "index_topk: sparse"),
        ({"num_local_experts": 4, "num_experts_per_tok": 8}, "chooses 8 of 4 experts"),
        ({"num_local_experts": 4, "num_experts_per_tok": 2, "moe_layer_freq": 0}, "moe_layer_freq 0"),
    ],
)
def test_configs_that_cannot_be_predicted(change, words):
    with pytest.raises(TargetError, match="some-model") as error:
        model(LLAMA | change)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_targets_by_folder_and_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "other.json").write_text("[1]")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    by_folder, by_file = (target_model(read_target(path)) for path in (tmp_path, tmp_path / "config.json"))
    assert by_folder == by_file == model(LLAMA)
    for name, words in (
        ("other.json", "expected a JSON object"),
        ("broken.json", "not valid JSON"),
        ("binary.json", "not valid JSON"),
    ):
        with pytest.raises(TargetError, match=words):
            read_target(tmp_path / name)
    with pytest.raises(UsageError, match="does not exist"):
        read_target(tmp_path / "none")


def test_heads_must_divide():
    check_parallel(model(LLAMA), 8)
    with pytest.raises(UsageError, match="32 attention heads of llama do not divide among 3 GPUs"):
        check_parallel(model(LLAMA), 3)


# Drafters


@pytest.mark.parametrize("layers", [1, 2])
def test_a_drafters_weights_are_its_tensors(layers):
    config = Eagle3Config(4096, 4096, 14336, 32, 8, 128, 128256, 32000, num_hidden_layers=layers)
    matrices = sum(math.prod(shape) for shape in tensor_shapes(config).values() if len(shape) == 2)
    assert drafter_model(config, "d").parameters == matrices


def test_drafters_from_a_config_without_weights(tmp_path):
    raw = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    target = model(LLAMA)
    found = read_drafter(tmp_path, target)
    usual = default_drafter(Target(Path("x"), LLAMA), target)
    assert (found.weights, found.head, found.fusion) == (usual.weights, usual.head, usual.fusion)
    assert found.head.total == 32000 * 4096 and found.fusion.total == 3 * 4096 * 4096
    with pytest.raises(CheckpointError, match="made for a target of hidden_size 4096, this target's is 7168"):
        read_drafter(tmp_path, model(DEEPSEEK))
    (tmp_path / "config.json").write_text(json.dumps(raw | {"mask_token_id": 5}))
    with pytest.raises(CheckpointError, match="only EAGLE-3 drafters"):
        read_drafter(tmp_path, target)
    with pytest.raises(UsageError, match="a folder with config"):
        read_drafter(tmp_path / "drafter.gguf", target)
    with pytest.raises(CheckpointError, match="missing"):
        read_drafter(tmp_path / "none.json", target)


def test_the_usual_drafter_of_a_latent_target():
    found = default_drafter(Target(Path("x"), KIMI), model(KIMI))
    assert found.hidden == 7168 and found.attention.heads == 56 and found.head.total == 32000 * 7168
    small = LLAMA | {"vocab_size": 500}
    assert default_drafter(Target(Path("x"), small), model(small)).head.total == 500 * 4096
