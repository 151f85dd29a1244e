from __future__ import annotations

import re
from collections import Counter

import pytest

from eyas.core import UsageError
from eyas.training.selfmade import FOLLOW_UPS, KINDS, Steering, is_whole
from eyas.training.topics import PROGRAMS, SYSTEMS, TOPICS


def test_seeds_are_a_function_of_their_number() -> None:
    one, other = Steering(temperatures=(0.0, 1.0)), Steering(temperatures=(0.0, 1.0))
    assert [one.at(n) for n in range(50)] == [other.at(n) for n in range(50)]
    assert [one.at(n) for n in range(50)] != [Steering(seed=1, temperatures=(0.0, 1.0)).at(n) for n in range(50)]


def test_seeds_are_of_every_kind() -> None:
    steering = Steering(temperatures=(0.0, 0.7), prompt_temperatures=(0.5, 1.0))
    seeds = [steering.at(n) for n in range(3000)]
    kinds = Counter(seed.kind for seed in seeds)
    assert set(kinds) == set(KINDS) and min(kinds.values()) > 50
    systems = Counter(seed.system for seed in seeds)
    assert set(systems) == {None, *SYSTEMS} and 0.4 < systems[None] / 3000 < 0.6
    assert {len(seed.begun) for seed in seeds} == {1, 2, 3, 4, 5, 6}
    assert all(len(seed.temperatures) == len(seed.begun) for seed in seeds)
    assert {t for seed in seeds for t in seed.temperatures} == {0.0, 0.7}
    assert {seed.prompt_temperature for seed in seeds} == {0.5, 1.0}
    assert len({seed.begun[0] for seed in seeds}) > 1200
    assert not any("{" in text for seed in seeds for text in seed.begun)


def test_seeds_can_be_steered() -> None:
    steering = Steering(kinds=("explain", "list"), topics=("hawks", "owls"), systems=("Be brief.",))
    seeds = [steering.at(n) for n in range(200)]
    assert {seed.kind for seed in seeds} == {"explain", "list"} and {seed.system for seed in seeds} == {"Be brief."}
    told = " ".join(seed.begun[0] for seed in seeds)
    assert "hawks" in told and "owls" in told and not any(f" {topic} " in told for topic in TOPICS)
    assert Steering(topics=("one",)).at(0)
    for bad in ({"kinds": ("magic",)}, {"topics": ()}):
        with pytest.raises(UsageError):
            Steering(**bad)


def test_the_lists_have_no_slips() -> None:
    assert len(set(TOPICS)) == len(TOPICS) > 300 and len(set(PROGRAMS)) == len(PROGRAMS)
    assert not any(not re.fullmatch(r"\S.*\S", text) for text in (*TOPICS, *PROGRAMS))
    for openings in KINDS.values():
        assert len(set(openings)) == len(openings)


def test_what_is_whole_is_not_continued() -> None:
    assert is_whole("Why is the sea important?") and is_whole("Continue.")
    assert not any(map(is_whole, ("", "Write", "Solve: ", "Summarize:\n\n")))
    assert any(map(is_whole, FOLLOW_UPS)) and not all(map(is_whole, FOLLOW_UPS))
