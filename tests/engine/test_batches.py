"""Several requests at once are answered as if each were alone, whatever their company does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import zoo
from engine.harness import (
    BUSH,
    CHAIN,
    SHAPES,
    TREE,
    Answer,
    decode,
    engine_for,
    plant,
    random_drafter,
    script,
    scripted,
)
from scripted import plans

from eyas.core import DraftShape, EyasError, Request, SamplingParams
from eyas.engine.engine import Engine
from eyas.engine.runner import Runner

NAMES = ("llama", "gpt2", "gemma3", "gpt-oss", "deepseek-v3", "kimi-k2.5", "qwen2.5-vl", "llama4", "gemma3-vl")
names = pytest.mark.parametrize("name", NAMES)
LONG = 500  # a prompt that nearly fills a context of 512, all that these models have positions for


@cache
def company(name: str) -> tuple[Request, ...]:
    """Greedy and sampled, short and long, drafted for and not, with an image where the model sees."""
    prompt = zoo.case(name).prompt
    wild = {"temperature": 1.5, "seed": 11}
    penalties = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "min_tokens": 8,
        "stop_token_ids": tuple(range(50)),
    }
    requests = [
        Request("greedy", prompt(30), SamplingParams(max_tokens=40)),
        Request("sampled", prompt(9, 1), SamplingParams(max_tokens=25, **wild)),
        Request("plain", prompt(7, 2), SamplingParams(max_tokens=30), speculate=False),
        Request("plain sampled", prompt(40, 3), SamplingParams(max_tokens=8, **wild), speculate=False),
        Request("penalties", prompt(1, 4), SamplingParams(max_tokens=30, **wild, **penalties)),
        Request("short", prompt(20, 5), SamplingParams(max_tokens=1)),
        Request("forced", prompt(12, 6), SamplingParams(max_tokens=20, **wild), output_ids=prompt(5, 7)),
        Request("last", prompt(31, 8), SamplingParams(max_tokens=12, temperature=0.9, seed=4, top_p=0.8)),
    ]
    if zoo.case(name).image:
        ids, images = zoo.case(name).image_prompt()
        requests.insert(1, Request("image", ids, SamplingParams(max_tokens=30), images))
    return tuple(requests)


@cache
def alone(name: str) -> dict[str, Answer]:
    return {r.id: decode(engine_for(name), r) for r in company(name)}


def drive(engine: Engine, arrivals: dict[int, list[Request]], aborts: dict[int, str]) -> dict[str, Answer]:
    """Steps an engine while requests come and go at given steps."""
    answers = {r.id: Answer() for requests in arrivals.values() for r in requests}
    for step in range(2000):
        for request in arrivals.get(step, ()):
            engine.add(request)
        if step in aborts:
            engine.abort(aborts[step])
        if engine.idle and step > max(arrivals):
            assert sorted(engine.scheduler.free) == list(range(engine.runner.cache.slots)), "a slot was lost"
            return answers
        for output in engine.step():
            answers[output.request_id].outputs.append(output)
    raise AssertionError("it never ends")


def staggered(requests: tuple[Request, ...], every: int) -> dict[int, list[Request]]:
    arrivals: dict[int, list[Request]] = {}
    for number, request in enumerate(requests):
        arrivals.setdefault(number * every, []).append(request)
    return arrivals


def drafters(name: str, steps: int) -> dict:
    known = {
        r.id: script(name, [*r.prompt_ids, *r.output_ids], r.images, alone(name)[r.id].tokens) for r in company(name)
    }
    known["forced"] = replace(
        known["forced"], answer=[*company_by_id(name)["forced"].output_ids, *known["forced"].answer]
    )
    return {
        "none": lambda: None,
        "scripted": lambda: scripted(known, plans(steps)["in turn"]),
        "random": lambda: random_drafter(name),
    }


def company_by_id(name: str) -> dict[str, Request]:
    return {r.id: r for r in company(name)}


@pytest.mark.parametrize("drafter", ["none", "scripted", "random"])
@names
def test_company_changes_nothing(name, drafter):
    expected = alone(name)
    shapes = {"none": [CHAIN], "scripted": [CHAIN, TREE, BUSH], "random": [TREE]}[drafter]
    for number, shape in enumerate(shapes):
        engine = engine_for(name, drafters(name, shape.num_steps)[drafter](), shape, slots=3)
        answers = drive(engine, staggered(company(name), every=number * 3), aborts={})
        for id, answer in answers.items():
            assert answer.tokens == expected[id].tokens, (id, shape)
            assert answer.finish_reason == expected[id].finish_reason
            assert (answer.stats.steps > 0) == (
                drafter != "none" and company_by_id(name)[id].speculate and id != "short"
            )


@names
def test_aborts_leave_the_others_alone(name):
    expected = alone(name)
    aborts = {0: "never heard of", 4: "greedy", 6: "plain", 7: "last", 9: "penalties"}  # running, waiting, unknown
    engine = engine_for(name, drafters(name, 4)["scripted"](), SHAPES["tree"], slots=3)
    answers = drive(engine, staggered(company(name), every=0), aborts)
    for id, answer in answers.items():
        if id in aborts.values():
            assert answer.tokens == expected[id].tokens[: len(answer.tokens)] != expected[id].tokens
        else:
            assert answer.tokens == expected[id].tokens
    assert not answers["last"].outputs


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_one_at_its_context_limit_beside_one_with_room(name):
    """gpt2 has a table of positions: a draft that goes beyond it is an error and not just a waste."""
    prompt = zoo.case(name).prompt
    requests = [
        Request("limit", prompt(LONG), SamplingParams(max_tokens=100, temperature=1.0, seed=1)),
        Request("room", prompt(9), SamplingParams(max_tokens=60)),
    ]
    expected = {r.id: decode(engine_for(name, context_length=512), r) for r in requests}
    assert len(expected["limit"].tokens) == 12 and expected["limit"].finish_reason == "length"
    known = {r.id: script(name, r.prompt_ids, None, expected[r.id].tokens) for r in requests}
    for shape in (*SHAPES.values(), DraftShape(4, 8, 9)):
        for drafter in (scripted(known, plans(shape.num_steps)["in turn"]), random_drafter(name)):
            engine = engine_for(name, drafter, shape, slots=2, context_length=512)
            answers = drive(engine, {0: requests}, {})
            assert {id: a.tokens for id, a in answers.items()} == {id: a.tokens for id, a in expected.items()}


BUGS = {
    "rows of the first": (
        Runner,
        "verify",
        "starts = tuple(s.length for s in sequences)",
        "starts = (sequences[0].length,) * len(sequences)",
    ),
    "slots in order": (
        Runner,
        "verify",
        "slots = tuple(s.slot for s in sequences)",
        "slots = tuple(range(len(sequences)))",
    ),
    "logits of the first": (Engine, "step", "output.logits[row, nodes]", "output.logits[0, nodes]"),
    "padding in the way": (
        Runner,
        "verify",
        "ancestors[row, :size, :size]",
        "ancestors[row] = True; ancestors[row, :size, :size]",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_these_tests_see(bug, monkeypatch):
    alone("llama")
    plant(monkeypatch, *BUGS[bug])
    with pytest.raises((AssertionError, ValueError, IndexError, EyasError)):
        test_company_changes_nothing("llama", "random")
        test_aborts_leave_the_others_alone("llama")
