"""Text from tokens as they come: what is streamed is the text, whole characters only, up to the first stop string."""

from __future__ import annotations

from functools import cache

import pytest
from engine.harness import plant, words
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from eyas.engine.text import TextStream, open_suffix

SPECIAL = ["<end>", "<turn>"]
CORPUS = [
    "the falcon flies; the falcon, the falcon!",
    "鹰在飞翔，鹰在天空。",
    "🦅 flies 🦅🪶 and 👩‍🚀 watches 🇳🇴",
    "naïve café, Ærøskøbing, Ελλάδα, שלום",
    "STOP it: stop.\n\nStop!\n\n\n",
]
LOST = "\ufffd"


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: all 256 bytes are tokens, and merges that end in the middle of characters."""
    model = Tokenizer(BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    model.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=model, additional_special_tokens=SPECIAL)


def whole(ids: list[int]) -> str:
    return tokenizer().decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def ids_of(text: str) -> list[int]:
    return tokenizer()(text)["input_ids"]


def single_bytes(text: str) -> list[int]:
    """The text in as many tokens as it has bytes: every character but ASCII is split."""
    table = {byte: char for char, byte in byte_of().items()}
    return [tokenizer().convert_tokens_to_ids(table[byte]) for byte in text.encode()]


@cache
def byte_of() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def stream(ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    """Pieces as they come, what the end releases last; no token follows a complete stop string."""
    text = TextStream(tokenizer(), stop)
    pieces = []
    for token in ids:
        pieces.append(text.push(token))
        if text.stopped:
            break
    return [*pieces, text.flush()], text


def cut(text: str, stop: tuple[str, ...]) -> str:
    return text[: min((text.find(s) for s in stop if s in text), default=len(text))]


pieces_of_text = st.one_of(
    st.sampled_from(CORPUS).map(ids_of),
    st.sampled_from(["🦅", "鹰", "é", "STOP", "stop\n", "👩‍🚀", LOST]).map(single_bytes),
    st.integers(0, 339).map(lambda token: [token]),
    st.just([0]),
)
token_ids = st.lists(pieces_of_text, max_size=8).map(lambda parts: [token for part in parts for token in part])
stops = st.lists(st.text("stop\n🦅鹰é! STOP", min_size=1, max_size=5), max_size=3).map(tuple)


@settings(max_examples=150, deadline=None)
@given(token_ids)
@example([*single_bytes("🦅")[:3]])
@example([*single_bytes("🦅")[:3], *single_bytes("鹰")])
@example([*single_bytes("é")[1:], *single_bytes("🦅")])
@example([*single_bytes(LOST), *ids_of("a")])
def test_the_pieces_are_the_text(ids):
    pieces, _ = stream(ids)
    assert "".join(pieces) == whole(ids)


@settings(max_examples=300, deadline=None)
@given(token_ids, stops)
@example(ids_of("the stop"), ("stop", "the stop"))
@example(ids_of("ststop"), ("stop",))
@example(single_bytes("a🦅b"), ("🦅",))
@example([*ids_of("stop"), *single_bytes("🦅")[:2]], ("op" + LOST,))
def test_up_to_the_first_stop_string(ids, stop):
    pieces, text = stream(ids, stop)
    expected = up_to_stop(ids, stop)
    assert "".join(pieces) == expected
    if expected == whole(ids):
        assert text.stopped is None
    else:
        assert text.stopped in stop and whole(ids)[len(expected) :].startswith(text.stopped)


def up_to_stop(ids: list[int], stop: tuple[str, ...]) -> str:
    """The text as far as it is certain after each token; once that holds a stop string, what comes before it."""
    for count in range(1, len(ids) + 1):
        text = whole(ids[:count])
        if not text.endswith(LOST) and any(s in text for s in stop):
            return cut(text, stop)
    return cut(whole(ids), stop)


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters=LOST), max_size=20), st.data())
def test_a_character_comes_whole_and_as_soon_as_it_can(text, data):
    """However text is cut into tokens: no piece holds U+FFFD, and a prefix is released once its last byte is there."""
    split = data.draw(st.booleans())
    ids = single_bytes(text) if split else ids_of(text)
    assume(LOST not in whole(ids))
    stream_ = TextStream(tokenizer())
    released = ""
    for count, token in enumerate(ids, start=1):
        released += stream_.push(token)
        assert LOST not in released
        so_far = whole(ids[:count])
        if not so_far.endswith(LOST):
            assert released == so_far
    assert released == text


def test_stop_strings_are_held_back_no_longer_than_needed():
    pieces, text = stream(single_bytes("sto stop, stop!more"), ("stop!",))
    assert pieces[:9] == ["", "", "", "sto ", "", "", "", "", "stop,"]
    assert "".join(pieces) == "sto stop, " and text.stopped


def test_overlapping_stop_strings():
    """What is complete first decides, even if another began sooner; of two complete at once, the earlier is cut."""
    falcon = ids_of(" falcon")
    assert len(falcon) == 1
    for ids, stop, expected in (
        (single_bytes("xabcd"), ("bc", "abcd"), "xa"),
        (falcon, ("lc", "alc"), " f"),
        (falcon, ("on", "co"), " fal"),
        (single_bytes("aaab"), ("aab", "aaa"), ""),
    ):
        assert "".join(stream(ids, stop)[0]) == expected


def test_a_stop_string_inside_one_token():
    [token] = ids_of(" falcon")
    pieces, text = stream([*ids_of("the"), token], ("lc",))
    assert "".join(pieces) == "the fa" and text.stopped


def test_special_tokens_are_no_text():
    end, turn = (tokenizer().convert_tokens_to_ids(s) for s in SPECIAL)
    pieces, _ = stream([turn, *single_bytes("鹰")[:1], end, *single_bytes("鹰")[1:], turn])
    assert "".join(pieces) == "鹰"
    shown = TextStream(tokenizer(), skip_special_tokens=False)
    assert "".join([shown.push(turn), shown.push(ids_of("a")[0]), shown.flush()]) == "<turn>a"


def test_an_unfinished_character_at_the_end():
    for bytes_ in (1, 2, 3):
        pieces, _ = stream([*ids_of("so"), *single_bytes("🦅")[:bytes_]])
        assert pieces[-1] == LOST and "".join(pieces) == "so" + LOST


def test_flush_gives_back_what_was_held():
    pieces, text = stream(ids_of("the st"), ("stop",))
    assert pieces[-1].endswith("st") and "".join(pieces) == "the st" and not text.stopped
    assert text.flush() == ""


def test_before_min_tokens_stop_strings_are_text():
    text = TextStream(tokenizer(), ("a",))
    assert text.push(ids_of("a")[0], may_stop=False) == "a" and not text.stopped
    assert text.push(ids_of("a")[0]) == "" and text.stopped


@pytest.mark.parametrize(
    ("text", "stop", "length"),
    [("abc", "cd", 1), ("abcc", "ccx", 2), ("ab", "ab", 0), ("a", "b", 0), ("", "ab", 0), ("xaa", "aab", 2)],
)
def test_open_suffix(text, stop, length):
    assert open_suffix(text, stop) == length


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("push", 'or whole.endswith("\\ufffd")', ""),
        ("_release", "self._held + new", "new"),
        ("flush", "self._release(rest, may_stop=True)", "rest"),
    ],
)
def test_these_tests_see(name, old, new, monkeypatch):
    plant(monkeypatch, TextStream, name, old, new)
    ids = [*ids_of("naïve"), *single_bytes("🦅 st"), *single_bytes("🦅")[:2]]
    pieces, _ = stream(ids, ("stop", "st" + LOST))
    assert "".join(pieces) != cut(whole(ids), ("stop", "st" + LOST)) or LOST in "".join(pieces[:-1])


@given(st.lists(st.integers(0, 159), max_size=12))
@settings(max_examples=50, deadline=None)
def test_tokenizers_whose_tokens_depend_on_the_one_before(ids):
    """Here every word but the first brings a space."""
    text = TextStream(words())
    assert "".join([*map(text.push, ids), text.flush()]) == words().decode(ids)


def test_the_last_test_sees_text_without_context(monkeypatch):
    plant(
        monkeypatch, TextStream, "push", "self._prefix, self._read = self._read, len", "self._prefix = self._read = len"
    )
    text = TextStream(words())
    assert "".join(map(text.push, (1, 2))) == "w001w002" != words().decode([1, 2])
