"""Config files of tiny targets of real classes, and of a drafter for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

IDS = [1, 3, 6]  # output ids, none of which is a default
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
DEEPSEEK = {
    **TEXT,
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 10,
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_SEES = {
    "patch_size": 14,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "merge_kernel_size": [2, 2],
}
KIMI_VL = {
    "architectures": ["KimiVLForConditionalGeneration"],
    "model_type": "kimi_vl",
    "media_placeholder_token_id": 90,
    "vision_config": {**_SEES, "model_type": "moonvit"},
    "text_config": DEEPSEEK,
}
_SEES_MORE = {
    **_SEES,
    "init_pos_emb_time": 4,
    "vt_num_attention_heads": 4,
    "vt_num_hidden_layers": 1,
    "vt_hidden_size": 32,
    "vt_intermediate_size": 48,
    "mm_hidden_size": 32,
    "text_hidden_size": 32,
}
KIMI_K25 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "media_placeholder_token_id": 90,
    "vision_config": _SEES_MORE,
    "text_config": {**DEEPSEEK, "model_type": "kimi_k2"},
}
QWEN2_AUDIO = {
    "architectures": ["Qwen2AudioForConditionalGeneration"],
    "model_type": "qwen2_audio",
    "audio_token_index": 91,
    "text_config": {**TEXT, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "audio_config": {
        "model_type": "qwen2_audio_encoder",
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "num_mel_bins": 16,
        "max_source_positions": 32,
    },
}
PALIGEMMA = {
    "architectures": ["PaliGemmaForConditionalGeneration"],
    "model_type": "paligemma",
    "image_token_index": 90,
    "projection_dim": 32,
    "hidden_size": 32,
    "text_config": {**TEXT, "model_type": "gemma", "head_dim": 8},
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
        "projection_dim": 32,
    },
}
DRAFTER = {
    **TEXT,
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "draft_vocab_size": 96,
    "tie_word_embeddings": False,
}
SGLANG_DRAFTER = {**DRAFTER, "eagle_config": {"eagle_aux_hidden_state_layer_ids": IDS, "use_aux_hidden_state": True}}
VLLM_DRAFTER = {**DRAFTER, "eagle_aux_hidden_state_layer_ids": [i + 1 for i in IDS]}


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "float32", **config}))
    return folder
