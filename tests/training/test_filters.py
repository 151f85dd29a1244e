from __future__ import annotations

import random

import numpy as np
import pytest

from eyas.training.answering import ENOUGH
from eyas.training.dataset import Row
from eyas.training.filters import Seen, end_at_sentence, loop_start, prompt_problem
from eyas.training.statistics import diversity


@pytest.mark.parametrize("period", [1, 2, 7, 40])
def test_a_loop_is_found_whatever_its_period(period: int) -> None:
    lead = list(range(1000, 1030))
    ids = lead + list(range(period)) * (600 // period)
    start = loop_start(ids)
    # the stretch that begins where the loop begins comes for the fourth time three periods later
    assert start == len(lead) + 3 * period


@pytest.mark.parametrize("period", [1, 5, 16, 17, 40, 128])
def test_a_server_that_stops_at_repetition_stops_behind_the_cut(period: int) -> None:
    """vLLM's rule: the last tokens are ``min_count`` times the same ones, of a length between the two sizes."""
    ids = [*range(1000, 1050), *(n % period for n in range(5 * 128))]

    def repeats(size: int, end: int) -> bool:
        times = ENOUGH["min_count"]
        return size * times <= end and ids[end - size * times : end] == ids[end - size : end] * times

    sizes = range(ENOUGH["min_pattern_size"], ENOUGH["max_pattern_size"] + 1)
    end = next(n for n in range(len(ids)) if any(repeats(size, n) for size in sizes))
    assert end < len(ids) and loop_start(ids[:end]) == loop_start(ids)


def test_ordinary_text_is_no_loop() -> None:
    assert loop_start(list(range(500))) is None
    assert loop_start([1, 2, 3] * 3) is None
    table = [i for n in range(30) for i in (7, 8, n + 100, 9, 10)]  # lines that are alike, with a number in each
    assert loop_start(table) is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "empty prompt"),
        ("Hm?", "meaningless prompt"),
        ("1234 5678 + 90", "meaningless prompt"),
        ("What is \ufffd in a text?", "meaningless prompt"),
        ("Why?\nassistant\nBecause", "prompt with roles in it"),
        ("the cat and the cat and the cat and the cat and the cat", "repetitive prompt"),
        ("Why do falcons dive?", ""),
        ("为什么猎鹰会俯冲下来？", ""),
    ],
)
def test_prompts_of_no_use(text: str, problem: str) -> None:
    assert prompt_problem(text, list(range(20))) == problem


def test_a_looping_prompt() -> None:
    assert prompt_problem("Some words that go on", [1, 2] * 60) == "looping prompt"


def test_an_endless_prompt_ends_with_its_last_sentence() -> None:
    assert end_at_sentence("Tell me. I want to know 3.5 things about", least=3) == "Tell me."
    assert end_at_sentence("Tell me about the", least=3) == ""
    assert end_at_sentence("Why? And", least=8) == ""


def text(words: list[str]) -> str:
    return " ".join(words)


def test_near_duplicates_are_told_from_prompts_on_the_same_subject() -> None:
    choose = random.Random(0)
    words = [f"word{n}" for n in range(400)]
    seen, kept = Seen(), []
    for _ in range(150):
        kept.append(choose.sample(words, 24))
        assert seen.add(text(kept[-1]))
    for sample in kept:
        assert not seen.add(text(sample).upper() + " ")
        assert not seen.add(text([*sample[:-1], "other"]))  # 21 of 23 threes in common: Jaccard 0.91
    found = [seen.add(text([*sample[:10], *choose.sample(words, 14)])) for sample in kept]
    assert sum(found) >= 148  # 8 of 36 threes in common: 0.22
    assert len(seen) == 150 + sum(found)


def test_short_prompts() -> None:
    seen = Seen()
    assert seen.add("Hi") and not seen.add("hi") and seen.add("Hello") and seen.add("")


def test_diversity_counts_what_it_says() -> None:
    def made(ids: list[int], prompt: str, kind: str) -> Row:
        return Row(np.array([99, *ids]), np.array([False] + [True] * len(ids)), "s", {"prompt": prompt, "kind": kind})

    figures = diversity([made([1, 2, 1, 2], "What is the sea?", "fact"), made([1, 2], "what is the sun?", "code")])
    assert figures["kinds"] == {"fact": 1, "code": 1}
    assert figures["different_openings"] == 0.5
    assert figures["distinct_1"] == round(2 / 6, 4)
    assert figures["distinct_2"] == 0.5  # 12 21 12, and 12: two of four
    assert figures["distinct_3"] == 1.0  # 121 212
    assert figures["different_tokens"] == 2
    assert figures["coverage"]["8192"] == 1.0
    assert figures["loss_tokens_per_row"]["p50"] == 3
    assert diversity([]) == {}
