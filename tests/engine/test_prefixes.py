"""What was computed for one prompt is not computed again for another that begins alike, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from engine.harness import (
    CHAIN,
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
from engine.test_stress import typed
from scripted import Wrong, plans

from eyas.core import EyasError, Request, SamplingParams
from eyas.engine import engine as engine_module
from eyas.engine import scheduler as scheduler_module
from eyas.engine.engine import Engine, image_key
from eyas.engine.scheduler import SHARED_AT_LEAST, Scheduler

NAME = "llama"
GREEDY = {"max_tokens": 8}


def request(id: str, ids: list[int], images: Any = None, **settings: Any) -> Request:
    changes = {key: settings.pop(key) for key in ("speculate", "output_ids") if key in settings}
    return Request(id, ids, SamplingParams(**{**GREEDY, **settings}), images, **changes)


def alone(asked: Request, name: str = NAME) -> list[int]:
    return decode(engine_for(name), asked).tokens


@contextmanager
def counted(engine: Engine) -> Iterator[list[int]]:
    """The tokens of the pieces of prompts that the target reads in each pass meanwhile."""
    read: list[int] = []
    original = engine.target.forward

    def forward(block: Any, *args: Any, ends: Any = None, **how: Any) -> Any:
        if ends is not None:
            read.append(int((ends + 1).sum()))
        return original(block, *args, ends=ends, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.target, "forward", forward)
        yield read


def cached(answer: Answer) -> int:
    return answer.outputs[-1].cached_tokens


def fed(name: str, *requests: Request, shape: Any = CHAIN, **settings: Any) -> Engine:
    """An engine whose drafter checks all that it is fed for these requests."""
    scripts = {r.id: script(name, r.prompt_ids, r.images, alone(r, name)) for r in requests}
    return engine_for(name, scripted(scripts, plans(shape.num_steps)["in turn"]), shape, **settings)


# What is shared


@pytest.mark.parametrize("follows", [False, True], ids=["plain", "followed"])
@pytest.mark.parametrize("shared", [0, 1, 15, 16, 17, 18, 29, 30])
def test_what_begins_alike_is_read_once(shared, follows):
    """The drafter's row for the last common token belongs to the token behind it: that one is read again."""
    prompt = zoo.case(NAME).prompt(30)
    other = request("other", prompt[:shared] + [149 - token for token in prompt[shared:]] + [5])
    first = request("first", prompt)
    engine = fed(NAME, first, other) if follows else engine_for(NAME)
    decode(engine, first)
    with counted(engine) as read:
        answer = decode(engine, other)
    usable = shared - follows
    assert cached(answer) == (usable if usable >= SHARED_AT_LEAST else 0)
    assert sum(read) == 31 - cached(answer)
    assert answer.tokens == alone(other)


@pytest.mark.parametrize("follows", [False, True], ids=["plain", "followed"])
def test_the_same_prompt_again(follows):
    """The last token is read again for its logits, whatever is there."""
    asked = request("r", zoo.case(NAME).prompt(30))
    engine = fed(NAME, asked) if follows else engine_for(NAME)
    first = decode(engine, asked)
    for _ in range(3):
        with counted(engine) as read:
            again = decode(engine, asked)
        assert read == [1] and cached(again) == 29
        assert again.tokens == first.tokens
    assert cached(first) == 0


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_conversation(shape):
    """Every turn continues all of the last one's prompt and answer."""
    ids, turns = zoo.case(NAME).prompt(20), []
    for turn in range(4):
        turns.append(request(str(turn), ids, max_tokens=9))
        ids = [*ids, *alone(turns[-1]), *zoo.case(NAME).prompt(6, seed=turn + 1)]
    engine = fed(NAME, *turns, shape=shape, max_running_requests=2)
    for before, asked in zip([None, *turns], turns, strict=False):
        with counted(engine) as read:
            answer = decode(engine, asked)
        if before is not None:
            told = len(before.prompt_ids) + 9
            # the last token of an answer is never read, and the drafter has yet to see what was verified last
            assert told - 1 - shape.num_steps - 2 <= cached(answer) < told
            assert sum(read) == len(asked.prompt_ids) - cached(answer)
        assert answer.tokens == alone(asked)


def test_while_the_first_is_still_being_answered():
    prompt = zoo.case(NAME).prompt(30)
    first = request("first", prompt, max_tokens=30)
    others = [request(str(n), [*prompt[:25], n, n]) for n in range(3)]
    engine = fed(NAME, first, *others, max_running_requests=3, chunked_prefill_size=40)
    engine.add(first)
    begun = [output for _ in range(2) for output in engine.step()]
    answers = {asked.id: Answer() for asked in (first, *others)}
    answers["first"].outputs += begun
    for asked in others:
        engine.add(asked)
    collect(engine, answers)
    assert [cached(answers[str(n)]) for n in range(3)] == [24, 24, 24]
    for asked in (first, *others):
        assert answers[asked.id].tokens == alone(asked)


@pytest.mark.parametrize("size", [256, 20])
def test_those_that_arrive_together(size):
    """The others wait until the first is read, and go on from there, together; who is like none of them may not."""
    prompt = zoo.case(NAME).prompt(25)
    requests = [request(str(n), [*prompt, n, *zoo.case(NAME).prompt(n, n)]) for n in range(6)]
    requests.append(request("other", zoo.case(NAME).prompt(9, seed=7)))
    engine = fed(NAME, *requests, max_running_requests=8, chunked_prefill_size=size)
    with counted(engine) as read:
        answers = run(engine, *requests)
    for asked in requests:
        assert answers[asked.id].tokens == alone(asked)
    shared = [cached(answers[asked.id]) for asked in requests]
    assert shared == ([0, *[24] * 5, 0] if size == 256 else [0, 19, 19, 24, 24, 24, 0]), "a few tokens: not worth it"
    assert sum(read) == sum(len(asked.prompt_ids) for asked in requests) - sum(shared)
    assert size < 256 or read == [26, 34]


def test_what_the_drafter_has_not_read_is_of_no_use_to_it():
    """Someone who wants no drafts leaves nothing behind for those who do; the other way round all is shared."""
    prompt = zoo.case(NAME).prompt(30)
    plain, drafted = request("plain", [*prompt, 1], speculate=False), request("drafted", [*prompt, 2])
    for requests, shared in (((plain, drafted), 0), ((drafted, plain), 30)):
        engine = fed(NAME, *requests)
        first, second = (decode(engine, asked) for asked in requests)
        assert cached(first) == 0 and cached(second) == shared
        assert second.tokens == alone(requests[1])
        assert (second.stats.steps > 0) == requests[1].speculate


def test_sampling_and_penalties_count_what_was_not_read():
    prompt = zoo.case(NAME).prompt(30)
    wild = {"temperature": 1.3, "seed": 5, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "max_tokens": 20}
    asked = request("r", prompt, **wild)
    engine = engine_for(NAME, random_drafter(NAME), TREE)
    decode(engine, request("r", prompt))
    answer = decode(engine, asked)
    assert cached(answer) == 29 and answer.tokens == alone(asked)


def test_an_answer_that_goes_on_shares_too():
    asked = request("r", zoo.case(NAME).prompt(30), max_tokens=20)
    engine = fed(NAME, asked)
    whole = decode(engine, asked)
    rest = decode(engine, replace(asked, output_ids=whole.tokens[:10]))
    assert rest.tokens == whole.tokens[10:] and cached(rest) >= 30


@pytest.mark.parametrize("end", ["stop", "abort", "error"])
def test_answers_that_end_early(end):
    """What was accepted behind an end is not there any more; what failed is not sound."""
    prompt = zoo.case(NAME).prompt(30)
    tokens = alone(request("r", prompt, max_tokens=30))
    asked = request("r", prompt, max_tokens=30, stop_token_ids=(tokens[9],) if end == "stop" else ())
    engine = fed(NAME, request("r", prompt, max_tokens=30))
    engine.add(asked)
    told = []
    while engine.scheduler.find("r") and len(told) < 9:
        told += [token.token_id for output in engine.step() for token in output.emitted]
    if end == "abort":
        engine.abort("r")
    elif end == "error":
        with torch.inference_mode():
            engine._fail(engine.scheduler.find("r"), EyasError("so it goes"))
    else:
        told += [token.token_id for output in engine.step() for token in output.emitted] if not engine.idle else []
    follow_up = request("next", [*prompt, *tokens[:5], 7, *tokens[6:20]])
    assert told == tokens[: len(told)]
    answer = decode(engine_like(engine, follow_up), follow_up)
    assert answer.tokens == alone(follow_up)
    assert cached(answer) == 0 if end == "error" else 29 < cached(answer) < 35


def engine_like(engine: Engine, asked: Request) -> Engine:
    """The same engine, whose drafter knows one more request."""
    engine.drafter.scripts[asked.id] = script(NAME, asked.prompt_ids, None, alone(asked))
    return engine


def test_the_one_unused_for_longest_is_given_up():
    """Memory for three short sequences: the fourth takes the place of what was not of use lately."""
    prompts = [zoo.case(NAME).prompt(20, seed) for seed in range(4)]
    engine = engine_for(NAME, context_length=100, kv_rows=3 * 65, max_running_requests=1)

    def ask(number: int) -> int:
        return cached(decode(engine, request("r", prompts[number])))

    assert [ask(n) for n in (0, 1, 2)] == [0, 0, 0]
    assert ask(0) == 19, "of use again"
    assert ask(3) == 0
    assert [ask(n) for n in (0, 3)] == [19, 19]
    assert [ask(n) for n in (1, 2)].count(19) <= 1


def test_put_back_and_read_again():
    """Who was put back finds what is left of its own rows, and its answer goes on as if nothing had been."""
    requests = [request(str(n), zoo.case(NAME).prompt(20, n), max_tokens=70) for n in range(3)]
    engine = fed(NAME, *requests, max_running_requests=3, kv_rows=256)
    with counted(engine) as read:
        answers = run(engine, *requests)
    assert engine.scheduler.preemptions > 0
    for asked in requests:
        assert answers[asked.id].tokens == alone(asked)
        assert cached(answers[asked.id]) <= len(asked.prompt_ids), "tokens of the prompt, not of the answer"
    assert sum(read) >= 60


# Images


def seeing(name: str, seed: int = 0) -> tuple[list[int], zoo.Images]:
    return zoo.case(name).image_prompt(30, seed)


IMAGES = [c.name for c in zoo.CASES if c.image]


@pytest.mark.parametrize("name", IMAGES)
def test_the_same_image_is_seen_once(name):
    """A conversation about it goes on; its words' types belong to the prompt, not to the image."""
    ids, images = seeing(name)
    first = request("first", ids, images)
    told = [*ids, *alone(first, name)]
    longer = [*told, 5, 6]
    second = request("second", longer, typed(images, len(longer)))
    engine = fed(name, first, second)
    decode(engine, first)
    with counted(engine) as read:
        answer = decode(engine, second)
    assert answer.tokens == alone(second, name)
    assert len(ids) <= cached(answer) < len(told)
    assert sum(read) == len(longer) - cached(answer)


@pytest.mark.parametrize("name", IMAGES)
def test_other_pixels_are_another_image(name):
    ids, images = seeing(name)
    other = {key: value + 1 if key == "pixel_values" else value for key, value in images.items()}
    first = request("first", ids, images)
    longer = [*ids, *alone(first, name), 5]
    second = request("second", longer, typed(other, len(longer)))
    text = request("text", [*ids[:5], *[3] * 26])
    engine = fed(name, first, second, text)
    for asked in (first, second, text):
        answer = decode(engine, asked)
        assert cached(answer) == 0, asked.id
        assert answer.tokens == alone(asked, name)


def test_an_image_is_shared_whole_or_not_at_all():
    """Prompts that differ before, in or behind the image: only what ends behind all of it is of use."""
    name = "kimi-k2.5"
    ids, images = zoo.case(name).image_prompt(40)
    ids = [*zoo.case(name).prompt(20, 9), *ids]
    end = max(i for i, token in enumerate(ids) if token == zoo.IMAGE) + 1
    first = request("first", ids, images)
    for at in (3, 18, 22, end, len(ids) - 1):
        changed = [*ids[:at], 77, *ids[at + 1 :]] if ids[at] != zoo.IMAGE else None
        if changed is None:
            continue
        second = request("second", [*changed, 4], images)
        engine = fed(name, first, second)
        decode(engine, first)
        answer = decode(engine, second)
        assert answer.tokens == alone(second, name)
        assert cached(answer) == 0 or cached(answer) >= end


def test_the_key_of_an_image():
    _, images = seeing("qwen2.5-vl")
    copy = {key: value.clone() for key, value in reversed(images.items())}
    assert image_key(images) == image_key(copy)
    for key, change in (("pixel_values", lambda x: x + 1e-3), ("image_grid_thw", lambda x: x.flip(-1))):
        assert image_key({**images, key: change(images[key])}) != image_key(images)
    assert image_key({"pixel_values": images["pixel_values"].half()}) != image_key(
        {"pixel_values": images["pixel_values"]}
    )
    assert image_key({"encoded": [1]}) != image_key({"encoded": [1]}), "unknown things are never the same"
    strange = {"pixel_values": torch.arange(6.0).view(2, 3).T, "flag": torch.tensor(True), "none": torch.zeros(0, 3)}
    assert image_key(strange) == image_key({k: v.contiguous() for k, v in strange.items()})
    assert image_key({"pixel_values": torch.ones(2, dtype=torch.bfloat16)})


# These tests see


BUGS = {
    "the drafter's row of a token that did not follow": (
        scheduler_module, "usable", "min(rows, shared - 1, covered)", "min(rows, covered)",
        lambda: test_what_begins_alike_is_read_once(18, True),
    ),
    "what the drafter has not read": (
        scheduler_module, "usable", "min(rows, shared - 1, covered)", "min(rows, shared - 1)",
        test_what_the_drafter_has_not_read_is_of_no_use_to_it,
    ),
    "what failed": (
        Engine, "_fail", "self.scheduler.finish(sequence, 0)", "self.scheduler.finish(sequence, sequence.length)",
        lambda: test_answers_that_end_early("error"),
    ),
    "other images": (
        Scheduler, "_shared", "if prefix.image_key == sequence.image_key", "if True",
        lambda: test_other_pixels_are_another_image("gemma3-vl"),
    ),
    "positions behind an image": (
        Scheduler, "_shared", "sequence.rope_delta = self.left[best].rope_delta", "pass",
        lambda: test_the_same_image_is_seen_once("qwen2.5-vl"),
    ),
    "nothing is shared": (
        Scheduler, "_admit", "self._shared(sequence)", "(-1, 0)", lambda: test_the_same_prompt_again(False),
    ),
    "pixels do not matter": (
        engine_module, "image_key", "digest.update(value", "(value",
        lambda: test_other_pixels_are_another_image("kimi-k2.5"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_these_tests_see(bug, monkeypatch):
    *place, test = BUGS[bug]
    plant(monkeypatch, *place)
    with pytest.raises((AssertionError, Wrong)):
        test()
