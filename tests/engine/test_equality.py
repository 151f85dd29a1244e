"""Losslessness: the engine's tokens are those of ``transformers.generate``, whatever is drafted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import zoo
from engine.harness import (
    CHAIN,
    DRAFTERS,
    SHAPES,
    TREE,
    accept_lengths,
    decode,
    engine_for,
    plant,
    random_drafter,
    scripted,
    truth,
)
from scripted import Wrong, plans

from eyas.engine import engine
from eyas.engine.engine import Engine, Step
from eyas.engine.runner import Runner
from eyas.target.masks import MaskKinds

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
@pytest.mark.thorough
def test_prompts_that_end_around_window_and_chunk_borders(name):
    for length in BORDERS:
        expected = truth(name, length=length, tokens=24)
        assert decode(engine_for(name), expected.request()).tokens == expected.tokens, length
        for shape in (CHAIN, TREE):
            drafter = scripted(expected.script, plans(shape.num_steps)["in turn"])
            assert decode(engine_for(name, drafter, shape), expected.request()).tokens == expected.tokens, length


@inputs
def test_random_drafters(name, image):
    expected = truth(name, image)
    for kind, shape in zip(DRAFTERS, SHAPES.values(), strict=True):
        answer = decode(engine_for(name, random_drafter(name, kind), shape), expected.request(max_tokens=24))
        assert answer.tokens == expected.tokens[:24]
        assert answer.stats.steps > 10


@pytest.mark.parametrize("name", [c.name for c in zoo.CASES if c.image])
def test_an_answer_about_an_image_goes_on_as_if_it_had_never_stopped(name):
    expected = truth(name, image=True)
    for done in (1, 10, 33):
        request = replace(expected.request(max_tokens=40), output_ids=expected.tokens[:done])
        for drafter in (None, scripted(expected.script, plans(4)["in turn"]), random_drafter(name)):
            assert decode(engine_for(name, drafter, TREE), request).tokens == expected.tokens[done:40]


BUGS: dict[str, tuple[Any, str, str, str]] = {
    "a rejected branch stays": (
        Runner,
        "keep",
        "self.cache.keep(batch.slot, self._tensor(batch.starts), acceptance.path)",
        "pass",
    ),
    "a row too many stays": (Runner, "keep", "acceptance.path)", "acceptance.path - 1)"),
    "states of the first nodes": (
        Runner,
        "keep",
        "states.gather(1, path[:, :, None].expand(-1, -1, states.shape[-1]))",
        "states",
    ),
    "a place too few": (Engine, "_take", "sequence.length += len(tokens)", "sequence.length += len(tokens) - 1"),
    "siblings see each other": (Runner, "verify", "ancestor_mask(draft)", "None"),
    "rows for places": (
        Runner,
        "verify",
        "draft.depths,",
        "torch.arange(draft.tokens.shape[1]).expand_as(draft.tokens),",
    ),
    "children of others": (
        engine,
        "accept",
        "above = draft.parents.clamp(min=0)",
        "above = (draft.depths[:, :, None] - 1 == draft.depths[:, None]).long().argmax(-1)",
    ),
    "a token is dropped": (Step, "of", "facts[2 : 2 + count],", "facts[2 : 2 + min(count, 2)] + facts[5 : 2 + count],"),
    "an accepted path is cut": (
        engine,
        "accept",
        "path.where(path < count, 0)",
        "path.where((path < count) & (nodes < 2), 0)",
    ),
    "no window": (MaskKinds, "_one", "- self.window", "- 99"),
}
CHAIN_BUGS: dict[str, tuple[Any, str, str, str]] = {
    "what is behind an error": (engine, "accept", ".cumprod(1).sum(1)", ".sum(1)"),
    "a token less than was accepted": (engine, "accept", ".cumprod(1).sum(1)", ".cumprod(1)[:, :-1].sum(1)"),
    "places start anew": (Runner, "verify", "self._tensor(batch.starts)", "0 * self._tensor(batch.starts)"),
    "states one place late": (
        Runner,
        "keep",
        "self._tensor(pending)[:, None] +",
        "self._tensor(pending)[:, None] + 1 +",
    ),
    "states that wait are not counted": (Engine, "_take", "sequence.pending += len(tokens)", "sequence.pending += 1"),
}


@pytest.mark.parametrize(("shape", "bug"), [*(("tree", bug) for bug in BUGS), *(("chain", bug) for bug in CHAIN_BUGS)])
def test_these_tests_see(shape, bug, monkeypatch):
    plant(monkeypatch, *(BUGS | CHAIN_BUGS)[bug])
    with pytest.raises((AssertionError, ValueError, IndexError, Wrong)):
        test_errors_at_every_position("gemma3", False, shape)


def test_these_tests_need_the_errors(monkeypatch):
    """A drafter that is never right hides a bug in what follows an accepted branch."""
    plant(monkeypatch, *BUGS["a rejected branch stays"])
    expected = truth("llama")
    wrong = scripted(expected.script, plans(TREE.num_steps)["wrong at 1"])
    assert decode(engine_for("llama", wrong, TREE), expected.request()).tokens == expected.tokens
    assert decode(engine_for("llama", scripted(expected.script), CHAIN), expected.request()).tokens == expected.tokens
