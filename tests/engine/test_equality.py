"""Losslessness: the engine's tokens are those of ``transformers.generate``, whatever is drafted."""

from __future__ import annotations

import pytest
import zoo
from engine.harness import (
    DRAFTERS,
    SHAPES,
    accept_lengths,
    decode,
    engine_for,
    random_drafter,
    scripted,
    truth,
)
from scripted import plans

INPUTS = [*((name, False) for name in zoo.NAMES), *((c.name, True) for c in zoo.CASES if c.image)]
inputs = pytest.mark.parametrize(("name", "image"), INPUTS, ids=[f"{n}-{'image' if i else 'text'}" for n, i in INPUTS])
names = pytest.mark.parametrize("name", zoo.NAMES)
shapes = pytest.mark.parametrize("shape", SHAPES)

BORDERS = (1, zoo.WINDOW - 1, zoo.WINDOW, zoo.WINDOW + 1)  # prompt lengths; 30, the default, is three windows and more


@inputs
def test_plain_decoding(name, image):
    expected = truth(name, image)
    assert len(set(expected.tokens)) >= 20
    assert decode(engine_for(name), expected.request()).tokens == expected.tokens


@shapes
@inputs
def test_errors_at_every_position(name, image, shape):
    """Every accept length and every roll-back; the drafter checks states, tokens and places at each."""
    expected = truth(name, image)
    script, shape = expected.script, SHAPES[shape]
    for plan, errs in plans(shape.num_steps).items():
        count = len(expected.tokens) if plan == "in turn" else 30
        answer = decode(engine_for(name, scripted(script, errs), shape), expected.request(max_tokens=count))
        assert answer.tokens == expected.tokens[:count], plan
        if plan == "in turn":
            assert set(accept_lengths(answer.stats)) == set(range(shape.num_steps + 1))


@names
def test_prompts_that_end_around_window_and_chunk_borders(name):
    for length in BORDERS:
        expected = truth(name, length=length, tokens=24)
        assert decode(engine_for(name), expected.request()).tokens == expected.tokens, length
        for shape in SHAPES.values():
            drafter = scripted(expected.script, plans(shape.num_steps)["in turn"])
            assert decode(engine_for(name, drafter, shape), expected.request()).tokens == expected.tokens, length


@pytest.mark.parametrize("kind", DRAFTERS)
@inputs
def test_random_drafters(name, image, kind):
    expected = truth(name, image)
    for shape in SHAPES.values():
        answer = decode(engine_for(name, random_drafter(name, kind), shape), expected.request(max_tokens=24))
        assert answer.tokens == expected.tokens[:24]
        assert answer.stats.steps > 10
