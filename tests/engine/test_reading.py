"""Prompts that are read together, in one pass padded to the longest, are answered as if each had been read alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import zoo
from engine.harness import (
    CHAIN,
    CONTEXT,
    SHAPES,
    TREE,
    Answer,
    collect,
    decode,
    engine_for,
    plant,
    random_drafter,
    run,
    script,
    scripted,
)
from scripted import Wrong, plans

from eyas.core import EyasError, NonFiniteLogitsError, Request, SamplingParams
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.engine.engine import Engine
from eyas.engine.runner import Runner
from eyas.engine.scheduler import Scheduler
from eyas.target.adapter import HFTarget

NAME = "llama"
LENGTHS = (30, 9, 26, 1, 17, 8, 33, 16)  # around window and chunk
TOKENS = 10  # of each answer
POISON, LOUD = 155, 156  # tokens that no prompt has and nobody chooses


@cache
def requests(name: str) -> tuple[Request, ...]:
    """Greedy and sampled, drafted for and not, none of which begins like another."""
    made = []
    for number, length in enumerate(LENGTHS):
        wild = {"temperature": 1.2, "seed": number, "top_p": 0.9} if number % 3 == 1 else {}
        sampling = SamplingParams(max_tokens=TOKENS, logprobs=1, **wild)
        made.append(Request(str(number), zoo.case(name).prompt(length, number), sampling, speculate=number % 4 != 3))
    return tuple(made)


@cache
def alone(name: str) -> dict[str, Answer]:
    return {asked.id: decode(engine_for(name), asked) for asked in requests(name)}


@contextmanager
def passes(engine: Engine) -> Iterator[list[list[str]]]:
    """Whose prompts each pass reads that does not fail."""
    found: list[list[str]] = []
    original = engine.runner.take

    def take(pieces: Any, output: Any) -> None:
        found.append([piece.sequence.request.id for piece in pieces])
        original(pieces, output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner, "take", take)
        yield found


def drafter_for(name: str, kind: str) -> Any:
    if kind == "random":
        return random_drafter(name)
    known = {asked.id: script(name, asked.prompt_ids, None, alone(name)[asked.id].tokens) for asked in requests(name)}
    return scripted(known, plans(5)["in turn"]) if kind == "scripted" else None


@pytest.mark.parametrize("kind", ["none", "scripted", "random"])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_together_as_alone(name, kind):
    """All in a few passes, and in pieces that end anywhere; the drafter checks every state that it is given."""
    for size in (256, 45):
        engine = engine_for(name, drafter_for(name, kind), CHAIN, max_running_requests=8, chunked_prefill_size=size)
        with passes(engine) as read:
            answers = run(engine, *requests(name))
        assert len(read) <= (3 if size == 256 else 6)
        for id, answer in answers.items():
            assert answer.tokens == alone(name)[id].tokens, id
            for mine, theirs in zip(answer.emitted, alone(name)[id].emitted, strict=True):
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_are_those_of_reading_alone(shape):
    """The drafter has the same rows and the same tip, so it proposes the same tokens while drafts are not cut."""
    seen: dict[str, dict[tuple[str, int], list[int]]] = {"alone": {}, "together": {}}
    for how, drafts in seen.items():
        drafter = random_drafter(NAME)
        watch(drafter, drafts)
        engine = engine_for(NAME, drafter, SHAPES[shape], max_running_requests=8)
        for asked in [requests(NAME)] if how == "together" else [[one] for one in requests(NAME)]:
            run(engine, *asked)
    assert seen["together"] == seen["alone"] and len(seen["alone"]) >= 12


def watch(drafter: Eagle3Drafter, drafts: dict[tuple[str, int], list[int]]) -> None:
    """Notes what is proposed, by request and token of its answer."""
    original = drafter.propose

    def propose(drafting: Any, shape: Any) -> Any:
        draft = original(drafting, shape)
        for sequence, tokens in zip(drafting.sequences, draft.tokens.tolist(), strict=True):
            if sequence is not None and len(sequence.output_ids) <= TOKENS - 6:
                drafts[sequence.request.id, len(sequence.output_ids)] = tokens
        return draft

    drafter.propose = propose  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["kimi-k2.5", "qwen2.5-vl", "gemma3-vl", "llama4"])
def test_an_image_among_texts(name):
    ids, images = zoo.case(name).image_prompt(30, 1)
    seen = Request("image", ids, SamplingParams(max_tokens=TOKENS), images)
    expected = decode(engine_for(name), seen).tokens
    engine = engine_for(name, random_drafter(name), TREE, max_running_requests=9)
    with passes(engine) as read:
        answers = run(engine, *requests(name)[:3], seen, *requests(name)[3:])
    assert ["image"] in read and len(read) <= 4
    assert answers.pop("image").tokens == expected
    assert {id: answer.tokens for id, answer in answers.items()} == {id: a.tokens for id, a in alone(name).items()}


# Faults


class Touchy(HFTarget):
    """Cannot stand one token, and computes NaN from another one on."""

    def __init__(self) -> None:
        self.passes = 0
        super().__init__(zoo.case(NAME).build())
        with torch.no_grad():
            self.model.get_input_embeddings().weight[POISON] = torch.nan

    def forward(self, block: Any, cache: Any, **how: Any) -> Any:
        if bool((block.tokens == LOUD).any()):
            super().forward(replace(block, tokens=block.tokens.where(block.tokens != LOUD, POISON)), cache, **how)
            raise RuntimeError("too loud")  # when the rows are written
        return super().forward(block, cache, **how)


@pytest.mark.parametrize("kind", ["none", "scripted", "random"])
@pytest.mark.parametrize("size", [256, 45])
@pytest.mark.parametrize("bad", [(LOUD,), (POISON,), (POISON, LOUD), (LOUD, LOUD)], ids=str)
@pytest.mark.thorough
def test_a_fault_in_a_group_is_that_of_one(bad, size, kind):
    """What raises is read again without it; what is NaN was never anybody else's. Twice: the slots are clean."""
    engine = Engine(
        Touchy(),
        drafter_for(NAME, kind),
        shape=CHAIN,
        context_length=CONTEXT,
        max_running_requests=8,
        chunked_prefill_size=size,
    )
    asked = list(requests(NAME))
    for token, at in zip(bad, (2, 6), strict=False):
        ids = asked[at].prompt_ids
        asked[at] = replace(asked[at], prompt_ids=[*ids[:5], token, *ids[6:]])
    for _ in "twice":
        answers = run(engine, *asked)
        for token, at in zip(bad, (2, 6), strict=False):
            error = answers.pop(str(at)).error
            assert type(error) is (NonFiniteLogitsError if token == POISON else EyasError)
        for id, answer in answers.items():
            assert answer.tokens == alone(NAME)[id].tokens, id
        cache = engine.runner.cache
        parts = cache.views(0, cache.slots, cache.length).values()
        assert all(bool(part.isfinite().all()) for pair in parts for part in pair)


def test_a_drafter_that_cannot_read_a_group_is_done_without():
    drafter = drafter_for(NAME, "random")

    def fails(*args: Any) -> None:
        raise RuntimeError("no memory for this")

    engine = engine_for(NAME, drafter, CHAIN, max_running_requests=8)
    drafter.extend = fails
    answers = run(engine, *requests(NAME))
    assert {id: answer.tokens for id, answer in answers.items()} == {id: a.tokens for id, a in alone(NAME).items()}
    assert all(answer.stats.steps == 0 for answer in answers.values())


@pytest.mark.parametrize("kind", ["none", "scripted"])
def test_members_come_and_go(kind):
    """Cancelled between the pieces of a group, and put back in the middle of their prompts for want of memory."""
    engine = engine_for(NAME, drafter_for(NAME, kind), CHAIN, max_running_requests=8, chunked_prefill_size=45)
    answers = {asked.id: Answer() for asked in requests(NAME)}
    for asked in requests(NAME):
        engine.add(asked)
    for gone in ("2", "0", "6"):  # half read; decoding; waiting
        for output in engine.step():
            answers[output.request_id].outputs.append(output)
        engine.abort(gone)
        del answers[gone]
    collect(engine, answers)
    assert {id: answer.tokens for id, answer in answers.items()} == {id: alone(NAME)[id].tokens for id in answers}


def test_members_are_put_back():
    long = [replace(asked, sampling=replace(asked.sampling, max_tokens=60)) for asked in requests(NAME)]
    expected = {asked.id: decode(engine_for(NAME), asked).tokens for asked in long}
    for size in (256, 45):
        settings = {"kv_rows": 4 * 65, "max_running_requests": 8, "chunked_prefill_size": size}
        engine = engine_for(NAME, random_drafter(NAME), TREE, **settings)
        with passes(engine) as read:
            answers = run(engine, *long)
        assert {id: answer.tokens for id, answer in answers.items()} == expected
        assert engine.scheduler.preemptions > 0 and max(map(len, read)) > 2


BUGS: dict[str, tuple[Any, str, str, str, Any]] = {
    "all begin where the first does": (
        Runner, "read", "self._tensor(starts)", "self._tensor(starts[:1] * len(starts))",
        lambda: test_together_as_alone(NAME, "none"),
    ),
    "all end where the first does": (
        Runner, "read", "piece.count - 1 for", "pieces[0].count - 1 for", lambda: test_together_as_alone(NAME, "none"),
    ),
    "all states are the first's": (
        Runner, "_feed", "output.states[row, count]", "output.states[0, count]",
        lambda: test_together_as_alone(NAME, "scripted"),
    ),
    "states of the padding": (
        Runner, "_feed", "output.states[row, count]", "output.states[row, -1]",
        lambda: test_together_as_alone(NAME, "scripted"),
    ),
    "as many states as the first": (
        Runner, "_feed", "self._tensor(known)", "self._tensor(known[:1] * len(known))",
        lambda: test_together_as_alone(NAME, "scripted"),
    ),
    "slots in any order": (
        Scheduler, "_groups", "key=lambda c: c.sequence.slot", "key=lambda c: -c.sequence.slot",
        lambda: test_together_as_alone(NAME, "none"),
    ),
    "one fault is everybody's": (
        Engine, "_read", "return [output for piece in pieces for output in self._read([piece])]",
        "return [self._fail(piece.sequence, error) for piece in pieces]",
        lambda: test_a_fault_in_a_group_is_that_of_one((LOUD,), 256, "none"),
    ),
    "images in company": (
        Scheduler, "_together", "or chunk.sequence.image_key or last.image_key", "",
        lambda: test_an_image_among_texts("kimi-k2.5"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_these_tests_see(bug, monkeypatch):
    *place, test = BUGS[bug]
    alone(NAME)
    plant(monkeypatch, *place)
    with pytest.raises((AssertionError, ValueError, IndexError, RuntimeError, KeyError, EyasError, Wrong)):
        test()
