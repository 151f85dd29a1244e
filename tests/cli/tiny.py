"""Tiny targets on disk that can be talked to: words for tokens, a chat template, and one that sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from zoo import IMAGE, VISION_END, VISION_START, VOCAB, WORDS, case

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
SEEING_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<start>{% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}assistant"
)
SPECIAL = {"<end>": WORDS, "<image>": IMAGE, "<start>": VISION_START, "<stop>": VISION_END, "<unk>": WORDS + 5}
ROLES = ("user", "assistant", "system")


def tokenizer(template: str | None = TEMPLATE, **more: Any) -> PreTrainedTokenizerFast:
    """Three roles, then w3, w4, ...: one word is one token."""
    words = {**{word: index for index, word in enumerate(ROLES)}, **{f"w{n}": n for n in range(len(ROLES), WORDS)}}
    words |= SPECIAL | {f"<spare{n}>": n for n in range(WORDS, VOCAB) if n not in SPECIAL.values()}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<end>", **more)
    fast.chat_template = template
    return fast


def save(folder: Path, model: PreTrainedModel | None = None, template: str | None = TEMPLATE) -> Path:
    """A target's folder: fp32, 4 layers, a lively little Llama unless told otherwise."""
    (model or case("llama").model).save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return folder


def save_seeing(folder: Path) -> Path:
    """A Gemma 3 that takes an image as four tokens."""
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    case("gemma3-vl").model.save_pretrained(folder)
    words = tokenizer(
        SEEING_TEMPLATE, extra_special_tokens={"image_token": "<image>", "boi_token": "<start>", "eoi_token": "<stop>"}
    )
    pictures = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    Gemma3Processor(pictures, words, chat_template=SEEING_TEMPLATE, image_seq_length=4).save_pretrained(folder)
    return folder


def poisoned() -> PreTrainedModel:
    """Answers NaN once the word w40 has been read."""
    model = case("llama").build()
    with torch.no_grad():
        model.get_input_embeddings().weight[40] = torch.nan
    return model
