"""Tiny random models of real transformers classes: same code as the big ones, seconds instead of minutes.

``CASES`` can be targets, ``REFUSED`` cannot. Every case decodes lively text (see ``assert_lively``): a random model
left to its default initialisation repeats one token for ever, and then any two decodings agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import transformers as tf
from torch import nn
from transformers import PreTrainedModel

VOCAB = 160
WORDS = 150  # ids below are words; those above are special and never predicted
IMAGE, VISION_START, VISION_END, VIDEO = 151, 152, 153, 154
WINDOW = CHUNK = 8  # every prompt is longer
DROP: Any = object()
TYPES = torch.empty(0)  # stands for the token types of the prompt, 1 where the image is

Images = dict[str, torch.Tensor]
DENSE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2


@dataclass(frozen=True)
class Case:
    """One architecture. ``model`` is built once per process: leave it as you found it, or ``build`` your own."""

    name: str
    build: Callable[[], PreTrainedModel]
    image: Callable[[torch.Generator], tuple[list[int], Images]] | None = None  # its token ids, and its tensors

    @property
    def model(self) -> PreTrainedModel:
        return _built(self.name)

    def prompt(self, length: int = 30, seed: int = 0) -> list[int]:
        """Random words, longer than window and chunk by default."""
        return torch.randint(0, WORDS, (length,), generator=_generator(seed)).tolist()

    def image_prompt(self, length: int = 30, seed: int = 0) -> tuple[list[int], Images]:
        """Words with an image among them, and the tensors a processor would give for it (without ids and mask)."""
        assert self.image is not None
        placeholders, images = self.image(_generator(seed + 1))
        words = self.prompt(length - len(placeholders), seed)
        ids = words[:5] + placeholders + words[5:]
        types = torch.tensor([[int(i == IMAGE) for i in ids]])
        return ids, {key: types if value is TYPES else value for key, value in images.items()}


@cache
def _built(name: str) -> PreTrainedModel:
    return case(name).build()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def case(name: str) -> Case:
    return next(c for c in CASES if c.name == name)


@torch.no_grad()
def enliven(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Gives every weight a size at which layers, attention, norms, sinks, biases and routers all make a difference."""
    generator = _generator(seed)
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            weight.copy_(0.2 * noise)
        elif not isinstance(weight, nn.Parameter):
            continue
        elif weight.dim() == 1:  # norms that scale by their weight keep their mean of 1
            scale = bool((weight == 1).all())
            weight.copy_(1.0 + 0.2 * noise if scale else 0.05 * noise)
        elif weight is embed:  # small where it is the head too, or every token predicts itself
            weight.copy_(noise * (0.2 if weight is head else 1.0))
        else:
            weight.copy_(1.5 * noise * weight.shape[-1] ** -0.5)
    head *= 2.0
    head[WORDS:] = 0.0  # special ids are never the most likely
    model.generation_config.eos_token_id = None
    return model.eval()


def assert_lively(model: PreTrainedModel, ids: list[int], images: Images | None = None, tokens: int = 64) -> None:
    """Plain greedy decoding yields at least 20 distinct tokens in 64, with a clear winner at every step."""
    out = model.generate(
        torch.tensor([ids]),
        max_new_tokens=tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **(images or {}),
    )
    text = out.sequences[0, len(ids) :].tolist()
    assert len(text) == tokens
    assert len(set(text)) >= 20, f"loops: {len(set(text))} distinct tokens in {tokens}"
    assert max(text) < WORDS, "predicts special ids"
    best = torch.cat(out.logits).topk(2).values
    gap = (best[:, 0] - best[:, 1]).min().item()
    assert gap > 5e-3, f"near-tie: smallest gap between the two best logits is {gap:.2g}"


# Builders


def _text(model: str, config: str, seed: int = 0, attention: str | None = None, **changes: Any) -> PreTrainedModel:
    """A text model: class names, and what its config adds to DENSE (DROP: it takes no such setting)."""
    made = getattr(tf, config)(**_settings(changes))
    kwargs = {} if attention is None else {"attn_implementation": attention}
    return enliven(getattr(tf, model)._from_config(made, **kwargs), seed)


def _settings(changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**DENSE, **changes}.items() if value is not DROP}


NO_GQA = {"head_dim": DROP, "num_key_value_heads": DROP}
DEEPSEEK = {
    "head_dim": DROP,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 12,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}


def _kimi_k25(seed: int = 0) -> PreTrainedModel:
    config = tf.Kimi_K25Config(
        text_config=tf.DeepseekV3Config(**_settings(DEEPSEEK)),
        vision_config={
            "patch_size": 4,
            "pos_emb_height": 8,
            "pos_emb_width": 8,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
        },
        projection_hidden_size=16,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=False,
    )
    return enliven(tf.Kimi_K25ForConditionalGeneration(config), seed)


def _kimi_image(generator: torch.Generator) -> tuple[list[int], Images]:
    pixels = torch.randn(4 * 4, 3, 4, 4, generator=generator)
    return [IMAGE] * 4, {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}


def _qwen25_vl(seed: int = 0) -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = tf.Qwen2_5_VLConfig(
        text_config=_settings({"head_dim": DROP, "tie_word_embeddings": DROP, "rope_parameters": rope}),
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "patch_size": 4,
            "window_size": 16,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=False,
    )
    return enliven(tf.Qwen2_5_VLForConditionalGeneration(config), seed)


def _qwen25_image(generator: torch.Generator) -> tuple[list[int], Images]:
    """Eight image tokens take four positions: whoever counts tokens instead gets the rest of the text wrong."""
    pixels = torch.randn(4 * 8, 3 * 2 * 4 * 4, generator=generator)
    images = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 8]]), "mm_token_type_ids": TYPES}
    return [VISION_START, *[IMAGE] * 8, VISION_END], images


def llama4(seed: int = 0, repair: bool = True) -> PreTrainedModel:
    text = DENSE | {
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 0, 1, 0],
        "attention_chunk_size": CHUNK,
        "attn_temperature_tuning": True,
        "floor_scale": 4,
        "attn_scale": 0.5,
    }
    config = tf.Llama4Config(
        text_config=text,
        vision_config={
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "vision_output_dim": 16,
            "image_size": 16,
            "patch_size": 4,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        boi_token_index=VISION_START,
        eoi_token_index=VISION_END,
        image_token_index=IMAGE,
    )
    model = enliven(tf.Llama4ForConditionalGeneration(config), seed)
    if repair:  # in 5.24.0 the class looks for a field that its language model's output does not have, and cannot run
        model.language_model.register_forward_hook(lambda _, _args, output: setattr(output, "image_outputs", None))
    return model


def _llama4_image(generator: torch.Generator) -> tuple[list[int], Images]:
    pixels = torch.randn(1, 3, 16, 16, generator=generator)
    return [VISION_START, *[IMAGE] * 4, VISION_END], {"pixel_values": pixels}


GEMMA3 = {"sliding_window": WINDOW, "layer_types": SLIDING_AND_FULL, "query_pre_attn_scalar": 8}


def _gemma3_vl(seed: int = 0) -> PreTrainedModel:
    config = tf.Gemma3Config(
        text_config=_settings(GEMMA3),
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
            "vision_use_head": False,
        },
        mm_tokens_per_image=4,
        boi_token_index=VISION_START,
        eoi_token_index=VISION_END,
        image_token_index=IMAGE,
        tie_word_embeddings=False,
    )
    return enliven(tf.Gemma3ForConditionalGeneration(config), seed)


def _gemma3_image(generator: torch.Generator) -> tuple[list[int], Images]:
    """Image tokens see each other in both directions."""
    pixels = torch.randn(1, 3, 16, 16, generator=generator)
    return [VISION_START, *[IMAGE] * 4, VISION_END], {"pixel_values": pixels, "token_type_ids": TYPES}


GPT2 = {
    "vocab_size": VOCAB,
    "n_positions": 512,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _gpt2(seed: int = 0) -> PreTrainedModel:
    return enliven(tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)), seed)


GPT_OSS = {
    "sliding_window": WINDOW,
    "layer_types": SLIDING_AND_FULL,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128},
}
LLAMA = ("LlamaForCausalLM", "LlamaConfig")
GEMMA = ("Gemma3ForCausalLM", "Gemma3TextConfig")

# The seeds are chosen for liveness: a test asserts it
CASES = [
    Case("llama", partial(_text, *LLAMA)),
    Case("llama-tied-eager", partial(_text, *LLAMA, attention="eager", tie_word_embeddings=True, seed=1)),
    Case("mistral", partial(_text, "MistralForCausalLM", "MistralConfig", sliding_window=WINDOW)),
    Case("qwen2", partial(_text, "Qwen2ForCausalLM", "Qwen2Config", head_dim=DROP)),
    Case("qwen3", partial(_text, "Qwen3ForCausalLM", "Qwen3Config")),
    Case("gpt2", _gpt2),
    Case("gpt-neox", partial(_text, "GPTNeoXForCausalLM", "GPTNeoXConfig", seed=12, **NO_GQA)),
    Case("gemma3", partial(_text, *GEMMA, **GEMMA3)),
    Case("gemma3-eager", partial(_text, *GEMMA, attention="eager", **GEMMA3)),
    Case("gpt-oss", partial(_text, "GptOssForCausalLM", "GptOssConfig", **GPT_OSS)),
    Case("deepseek-v3", partial(_text, "DeepseekV3ForCausalLM", "DeepseekV3Config", seed=2, **DEEPSEEK)),
    Case("kimi-k2.5", _kimi_k25, _kimi_image),
    Case("qwen2.5-vl", partial(_qwen25_vl, seed=1), _qwen25_image),
    Case("llama4", partial(llama4, seed=6), _llama4_image),
    Case("gemma3-vl", partial(_gemma3_vl, seed=4), _gemma3_image),
]
NAMES = [c.name for c in CASES]


# Models that cannot be targets


@dataclass(frozen=True)
class Refused:
    name: str
    build: Callable[[], Any]
    reason: str  # a regular expression that the refusal must match
    needs: str = "PreTrainedModel"  # a class that older transformers lack


class NoDecoder(tf.LlamaPreTrainedModel):
    """Has weights and a head but nothing that looks like a list of decoder layers."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(VOCAB, 32)
        self.lm_head = nn.Linear(32, VOCAB)

    def forward(self, input_ids: torch.Tensor, position_ids: Any = None, cache: Any = None, **kwargs: Any) -> Any:
        return self.lm_head(self.embed_tokens(input_ids))


def _llama_without_head() -> PreTrainedModel:
    return tf.LlamaModel(tf.LlamaConfig(**DENSE))


def _mamba() -> PreTrainedModel:
    return tf.MambaForCausalLM(tf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4))


def _kimi_linear() -> PreTrainedModel:
    linear = {"linear_head_dim": 8, "linear_num_heads": 4, "num_experts_per_token": 2, "num_experts": 4}
    dropped = ("n_routed_experts", "n_group", "num_experts_per_tok", "first_k_dense_replace", "head_dim")
    shared = _settings({**DEEPSEEK, **dict.fromkeys(dropped, DROP)})
    return tf.KimiLinearForCausalLM(tf.KimiLinearConfig(**shared, **linear))


def _qwen3_next() -> PreTrainedModel:
    linear = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    }
    return tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**DENSE, **linear))


def _t5() -> PreTrainedModel:
    return tf.T5ForConditionalGeneration(
        tf.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    )


def _bloom() -> PreTrainedModel:
    return tf.BloomForCausalLM(tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4))


def _falcon_alibi() -> PreTrainedModel:
    config = tf.FalconConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, eos_token_id=None
    )
    return enliven(tf.FalconForCausalLM(config))


def _gpt_neo() -> PreTrainedModel:
    attention = [[["global", "local"], 2]]
    config = tf.GPTNeoConfig(
        vocab_size=VOCAB, hidden_size=32, num_layers=4, num_heads=4, attention_types=attention, window_size=WINDOW
    )
    return enliven(tf.GPTNeoForCausalLM(config))


def _positions_from_one() -> PreTrainedModel:
    """Adds one to the positions it is given, but not to those it makes itself (as Kosmos-2.5 does)."""
    model = _gpt2()

    def shift(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        given = kwargs.get("position_ids")
        return args, kwargs | {"position_ids": None if given is None else given + 1}

    model.transformer.register_forward_pre_hook(shift, with_kwargs=True)
    return model


def _layer_left_out() -> PreTrainedModel:
    model = case("llama").build()
    model.model.config.num_hidden_layers = 3
    return model


def _gemma3n() -> PreTrainedModel:
    config = tf.Gemma3nTextConfig(
        **_settings({}),
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        altup_num_inputs=2,
        laurel_rank=4,
        num_kv_shared_layers=0,
        sliding_window=WINDOW,
        layer_types=SLIDING_AND_FULL,
        activation_sparsity_pattern=[0.0] * 4,
    )
    return tf.Gemma3nForCausalLM(config)


REFUSED = [
    Refused("mamba", _mamba, "recurrent state"),
    Refused("kimi-linear", _kimi_linear, "recurrent state .*linear_attention", needs="KimiLinearForCausalLM"),
    Refused("qwen3-next", _qwen3_next, "recurrent state .*linear_attention"),
    Refused("t5", _t5, "encoder-decoder"),
    Refused("llama-without-head", _llama_without_head, r"No output head .*get_output_embeddings\(\) gave None"),
    Refused("no-decoder", lambda: NoDecoder(tf.LlamaConfig(**DENSE)), "No decoder layers .*looked for a ModuleList"),
    Refused("bloom", _bloom, "takes no position_ids"),
    Refused("falcon-alibi", _falcon_alibi, "does not take a tree mask with positions of its own: ValueError"),
    Refused("gpt-neo", _gpt_neo, "window of its local layers to rows of the cache instead of positions"),
    Refused("positions-from-one", _positions_from_one, "ignores the mask or the positions .* or uses them differently"),
    Refused("layer-left-out", _layer_left_out, r"did not run layers \[3, 4\] of the 4 it has"),
    Refused("gemma3n", _gemma3n, "more than one stream"),
]
