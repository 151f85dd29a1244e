"""A tokenizer that can spell JSON, for the zoo's vocabulary: characters, and pieces that cross borders of values."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from zoo import VOCAB, WORDS

END = WORDS  # its logit is always 0 in the zoo: ends are chosen, and not too often
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
PAIRS = (
    *('{ "', '" :', '" ,', '" }', "} ,", "] ,", "] }", "} }", '[ "', "[ ]", "{ }", ", Ġ", ": Ġ", "Ċ Ġ", "1 2"),
    *("t r", "tr u", "tru e", "f a", "fa l", "fal s", "fals e", "n u", "nu l", "nul l", "a b"),
    *('", "', '": Ġ', '": {'),
)


@cache
def tokenizer() -> Any:
    """Printable ASCII and the newline, by the names that GPT-2's tokenizers give to bytes."""
    letters = ["Ċ", "Ġ", *map(chr, range(33, 127))]
    merges = [tuple(pair.split(" ")) for pair in PAIRS]
    words = [*letters, *("".join(pair) for pair in merges)]
    assert len(set(words)) == len(words) <= WORDS
    words += (
        [f"<spare{n}>" for n in range(len(words), WORDS)]
        + ["<end>"]
        + [f"<special{n}>" for n in range(WORDS + 1, VOCAB)]
    )
    made = Tokenizer(BPE({word: index for index, word in enumerate(words)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([word for word in words if word.startswith("<") and len(word) > 1])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="<special159>")
    fast.chat_template = TEMPLATE
    return fast
