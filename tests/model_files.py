"""Tiny targets as files: model folders with a tokenizer, and GGUF files as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_llama(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changes}))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate([*SPECIAL, *(f"w{n}" for n in range(90))])}
    tokenizer = Tokenizer(WordLevel(words, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=SPECIAL[0], eos_token=SPECIAL[2])


def save(folder: Path, model: PreTrainedModel | None = None, *, tokenizer: bool = True) -> Path:
    """A model folder, tiny Llama unless told otherwise."""
    (model or tiny_llama()).save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder


def write_gguf(path: Path, model: LlamaForCausalLM, *, tokenizer: bool = True) -> Path:
    """``model`` as float32 GGUF: q and k rows permuted for ggml's rotary embedding, a tied head left out."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        _add_tokenizer(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if "q_proj" in name:
            weight = _permuted(weight, config.num_attention_heads)
        elif "k_proj" in name:
            weight = _permuted(weight, config.num_key_value_heads)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Within each head, row i of the first half next to row i of the second half."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape).contiguous()


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Bytes, a token for two newlines, and the special tokens of a chat model, in front as SmolLM2 has them."""
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "th"]
    special = [gguf.TokenType.CONTROL] * len(SPECIAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(special + [gguf.TokenType.NORMAL] * (len(tokens) - len(special)))
    writer.add_token_merges(["Ċ Ċ", "t h"])  # more than one: transformers 5.16 takes a list of one for a scalar
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
