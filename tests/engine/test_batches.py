"""Several requests at once are answered as if each were alone, whatever their company does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

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
from scripted import Wrong, plans

from eyas.core import DraftShape, EyasError, Request, SamplingParams
from eyas.engine import runner
from eyas.engine.engine import Engine
from eyas.engine.runner import Runner
from eyas.engine.scheduler import SHARED_AT_LEAST, Scheduler
from eyas.speculation import sampling

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
        Request("greedy", prompt(30), SamplingParams(max_tokens=40, logprobs=2)),
        Request("sampled", prompt(9, 1), SamplingParams(max_tokens=25, logprobs=2, **wild)),
        Request("plain", prompt(7, 2), SamplingParams(max_tokens=30), speculate=False),
        Request("plain sampled", prompt(40, 3), SamplingParams(max_tokens=8, **{**wild, "seed": 12}), speculate=False),
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
            return answers
        for output in engine.step():
            answers[output.request_id].outputs.append(output)
        engine.scheduler.check()
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
        settings = {"max_running_requests": 3, "chunked_prefill_size": (7, 256, 13)[number]}
        together = engine_for(name, drafters(name, shape.num_steps)[drafter](), shape, **settings)
        answers = drive(together, staggered(company(name), every=number * 3), aborts={})
        for id, answer in answers.items():
            assert answer.tokens == expected[id].tokens, (id, shape)
            assert answer.finish_reason == expected[id].finish_reason
            assert_same_reports(answer, expected[id])
            assert (answer.stats.steps > 0) == (
                drafter != "none" and company_by_id(name)[id].speculate and id != "short"
            )


def assert_same_reports(one: Answer, other: Answer) -> None:
    for mine, theirs in zip(one.emitted, other.emitted, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in mine.top_logprobs] == [token for token, _ in theirs.top_logprobs]


@pytest.mark.parametrize("drafter", ["none", "scripted", "random"])
@names
@pytest.mark.thorough
def test_a_second_company_goes_on_from_what_the_first_left(name, drafter):
    """Prompts that were read before start from their rows, while others run over and beside them."""
    expected = alone(name)
    together = engine_for(name, drafters(name, 4)[drafter](), TREE, max_running_requests=3, kv_rows=2048)
    for every in (0, 2, 5):
        answers = drive(together, staggered(company(name), every), aborts={})
        assert {id: answer.tokens for id, answer in answers.items()} == {id: a.tokens for id, a in expected.items()}
    cached = {id: answer.outputs[-1].cached_tokens for id, answer in answers.items()}
    for id, request in company_by_id(name).items():
        most = 0 if request.images else len(request.prompt_ids) + len(request.output_ids) - 1
        assert cached[id] in (0, most if most >= SHARED_AT_LEAST else 0)
    assert sum(count > 0 for count in cached.values()) >= 2


@names
def test_aborts_leave_the_others_alone(name):
    expected = alone(name)
    aborts = {0: "never heard of", 4: "greedy", 6: "plain", 7: "last", 9: "penalties"}  # running, waiting, unknown
    engine = engine_for(name, drafters(name, 4)["scripted"](), SHAPES["tree"], max_running_requests=3)
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
            engine = engine_for(name, drafter, shape, max_running_requests=2, context_length=512)
            answers = drive(engine, {0: requests}, {})
            assert {id: a.tokens for id, a in answers.items()} == {id: a.tokens for id, a in expected.items()}


BUGS: dict[str, tuple[Any, str, str, str, str]] = {
    "rows of the first": (
        Runner, "verify", "self._tensor(batch.starts)", "self._tensor([batch.starts[0]] * len(batch.starts))", "random",
    ),
    "facts of the first": (Engine, "_take", "step.of(row)", "step.of(0)", "random"),
    "slots in order": (
        Engine, "_batch", "rows[sequence.slot] = sequence", "rows[plan.decode.index(sequence)] = sequence", "random",
    ),
    "prompts into the first slot": (Runner, "read", "first.slot,", "0,", "random"),
    "prompts where the first begins": (
        Runner, "read", "self._tensor(starts)", "self._tensor(starts[:1] * len(starts))", "random",
    ),
    "the first's end": (Runner, "read", "piece.count - 1 for", "pieces[0].count - 1 for", "none"),
    "the first's states": (Runner, "_feed", "output.states[row, count]", "output.states[0, count]", "scripted"),
    "the longest one's end": (Runner, "_feed", "output.states[row, count]", "output.states[row, -1]", "scripted"),
    "as many states as the first": (
        Runner, "_feed", "self._tensor(known)", "self._tensor(known[:1] * len(known))", "scripted",
    ),
    "logits of the first": (Engine, "_emit", "logits[row, path]", "logits[0, path]", "random"),
    "padding in the way": (
        Runner, "verify", "ancestor_mask(draft)", "ancestor_mask(draft) | (draft.parents < 0)[:, None]", "scripted",
    ),
    "seeds of the first": (sampling, "_group", "member.sampling.seed for", "members[0].sampling.seed for", "random"),
    "indices of the first": (sampling, "_group", "member.output_index for", "members[0].output_index for", "random"),
    "settings of the first": (runner, "rows_of", "key: Any = _settings(params)", "key: Any = params.greedy", "random"),
    "states of the first": (Runner, "keep", "[slots, place] = states", "[slots, place] = states[:1]", "scripted"),
    "waiting states of the first": (Runner, "keep", "self._tensor(pending)[:, None]", "pending[0]", "scripted"),
    "rows of a half-read prompt are free": (
        Scheduler, "starts", "append(sequence.length)", "append(sequence.length * sequence.decoding)", "random",
    ),
    "a copy is forgotten": (Runner, "arrange", "self.cache.copy(move.source, move.dest, move.rows)", "pass", "random"),
    "states stay behind": (Runner, "arrange", "= self._pending[move.source]", "= 0", "scripted"),
    "prefixes are free": (Scheduler, "starts", "found.append(min(len(prefix.ids), most))", "found.append(0)", "random"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.thorough
def test_these_tests_see(bug, monkeypatch):
    alone("llama")
    *place, drafter = BUGS[bug]
    plant(monkeypatch, *place)
    with pytest.raises((AssertionError, ValueError, IndexError, EyasError, Wrong)):
        test_company_changes_nothing("llama", drafter)
        test_a_second_company_goes_on_from_what_the_first_left("llama", drafter)
        test_aborts_leave_the_others_alone("llama")
