"""How answers end, what is reported of them, and what goes wrong: alike with and without speculation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import zoo
from engine.harness import (
    CHAIN,
    CONTEXT,
    LAYERS,
    SHAPES,
    TREE,
    Answer,
    collect,
    decode,
    engine_for,
    plain_pass,
    plainly,
    plant,
    random_drafter,
    run,
    scripted,
    truth,
    words,
)
from scripted import ScriptedDrafter, Wrong, plans

from eyas.core import Draft, DraftShape, NonFiniteLogitsError, Request, RequestError, SamplingParams, UsageError
from eyas.drafter.contract import Drafting
from eyas.engine.engine import Engine
from eyas.engine.policy import limited
from eyas.engine.runner import Runner
from eyas.engine.stats import AcceptanceStats
from eyas.target.adapter import HFTarget

NAME = "llama"
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def greedy(**sampling: Any) -> Request:
    return truth(NAME).request(**sampling)


def speaking(drafter: Any = None, shape: DraftShape | None = None, **settings: Any) -> Engine:
    return engine_for(NAME, drafter, shape, tokenizer=words(), **settings)


# How answers end


def firsts() -> list[int]:
    """Places in the answer whose token did not come before: an answer can be made to end exactly there."""
    tokens = truth(NAME).tokens
    return [i for i in range(1, 14) if tokens[i] not in tokens[:i]]


def word(place: int) -> str:
    return f"w{truth(NAME).tokens[place]:03}"


class Recorder(ScriptedDrafter):
    """Keeps every draft it made: how deep it was, and of how many tokens beside the root."""

    def start(self, *args: Any) -> None:
        super().start(*args)
        self.drafts: list[tuple[int, int]] = []

    def propose(self, drafting: Drafting, shape: DraftShape) -> Draft:
        draft = super().propose(drafting, shape)
        depth = draft.tokens.shape[1] - 1 if draft.depths is None else int(draft.depths.max())
        self.drafts.append((depth, draft.tokens.shape[1] - 1))
        return draft


def recount(drafts: list[tuple[int, int]], answer: Answer) -> AcceptanceStats:
    """Statistics from the drafts and what was emitted after each, position by position."""
    outputs = answer.outputs[1 : 1 + len(drafts)]  # the first came of the prompt; a last one may have needed no draft
    assert all(not token.drafted for output in answer.outputs[1 + len(drafts) :] for token in output.emitted)
    stats = AcceptanceStats(steps=len(drafts))
    for (depth, tokens), output in zip(drafts, outputs, strict=True):
        hits = [token.drafted for token in output.emitted]
        stats.drafted += tokens
        stats.emitted += len(hits)
        for position in range(depth):
            if position == len(stats.reached):
                stats.reached.append(0)
                stats.accepted.append(0)
            if position < len(hits):  # what was emitted at this place decides about the draft's position
                stats.reached[position] += 1
                stats.accepted[position] += hits[position]
    return stats


def endings() -> dict[str, Any]:
    """Name -> (settings of the request, settings of the engine, the answer's length, its finish reason)."""
    tokens, made = truth(NAME).tokens, {}
    for at in firsts():
        end = at + 1
        made[f"stop id at {at}"] = {"stop_token_ids": (159, tokens[at])}, {}, end, "stop"
        made[f"end of sequence at {at}"] = {}, {"eos_ids": (tokens[at],)}, end, "stop"
        made[f"stop string at {at}"] = {"stop": ("nothing", word(at))}, {}, end, "stop"
        made[f"stop string over two tokens at {at}"] = {"stop": (f"{word(at - 1)[-1:]} {word(at)}",)}, {}, end, "stop"
        made[f"max_tokens at {at}"] = {"max_tokens": end}, {}, end, "length"
        made[f"context at {at}"] = {}, {"context_length": len(truth(NAME).prompt) + end}, end, "length"
        made[f"ignored end of sequence at {at}"] = (
            {"ignore_eos": True, "max_tokens": 20},
            {"eos_ids": (tokens[at],)},
            20,
            "length",
        )
        made[f"both at once at {at}"] = {"max_tokens": end, "stop_token_ids": (tokens[at],)}, {}, end, "stop"
    return made


@shapes
def test_endings_inside_an_accepted_run(shape):
    """Every place of a run is an end once; all that is reported ends there too, and equals plain decoding's."""
    expected = truth(NAME)
    assert len(firsts()) >= 8
    for label, (sampling, settings, length, reason) in endings().items():
        request = greedy(logprobs=1, **sampling)
        drafter = Recorder({"r": expected.script}, layer_ids=LAYERS)
        engine = speaking(drafter, shape, **settings)
        plain, fast = decode(engine, plainly(request)), decode(engine, request)
        assert plain.tokens == fast.tokens == expected.tokens[:length], label
        assert plain.finish_reason == fast.finish_reason == reason, label
        assert plain.text == fast.text == text_of(request, fast), label
        assert_same_reports(plain, fast)
        assert plain.stats.steps == 0
        assert fast.stats == recount(drafter.drafts, fast), label


def text_of(request: Request, answer: Answer) -> str:
    """The tokens as text, without what ended it."""
    sampling, tokens = request.sampling, answer.tokens
    if answer.finish_reason == "stop" and not any(stop in words().decode(tokens) for stop in sampling.stop):
        tokens = tokens[:-1]
    text = words().decode(tokens)
    return text[: min((text.find(stop) for stop in sampling.stop if stop in text), default=len(text))]


def assert_same_reports(plain: Answer, fast: Answer) -> None:
    for one, other in zip(plain.emitted, fast.emitted, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top_logprobs] == [token for token, _ in other.top_logprobs]


@shapes
def test_min_tokens_keeps_ends_out_of_the_first_tokens(shape):
    """Forbidden ends change the text itself, so plain decoding is the reference; afterwards they end it as usual."""
    tokens = truth(NAME).tokens
    stops = tuple(tokens[2:12:3])
    for least in (0, 1, 2, 3, 4, 7, 13, 30):
        request = greedy(stop_token_ids=stops, min_tokens=least)
        plain = decode(speaking(), request)
        assert len(plain.tokens) >= max(least, 1) and not set(plain.tokens[:-1]) & set(stops)
        script = replace(truth(NAME).script, answer=plain.tokens, states=None)
        for errs in plans(shape.num_steps).values():
            fast = decode(speaking(scripted(script, errs), shape), request)
            assert (fast.tokens, fast.text, fast.finish_reason) == (plain.tokens, plain.text, plain.finish_reason)


def test_stop_strings_before_min_tokens_are_text():
    at = firsts()[2]
    stop = f"{word(at)} {word(at + 1)}"
    short, long = (decode(speaking(), greedy(stop=(stop,), min_tokens=n)) for n in (0, at + 3))
    assert len(short.tokens) == at + 2 and stop not in short.text
    assert len(long.tokens) == len(truth(NAME).tokens) and stop in long.text
    # and in an answer that goes on from there
    done = truth(NAME).tokens[: at + 4]
    request = replace(greedy(stop=(stop,), min_tokens=at + 3), output_ids=done)
    rest = decode(speaking(), request)
    assert rest.tokens == truth(NAME).tokens[len(done) :]
    assert words().decode(done) + rest.text == long.text


def test_text_goes_on_where_a_forced_answer_stopped():
    whole = decode(speaking(), greedy(stop=(f"{word(3)} {word(4)} nothing",)))
    for count in range(1, 12):
        request = replace(greedy(stop=(f"{word(3)} {word(4)} nothing",)), output_ids=whole.tokens[:count])
        drafter = scripted(truth(NAME).script, plans(5)["in turn"])
        rest = decode(speaking(drafter), request)
        assert rest.tokens == whole.tokens[count:]
        before = "".join(o.text for o in whole.outputs[:count])
        assert before + rest.text == whole.text


def test_a_tree_is_cut_to_what_can_still_be_used():
    assert limited(CHAIN, 9) is CHAIN and limited(CHAIN, 0) is None and limited(TREE, -1) is None
    for shape in SHAPES.values():
        for steps in range(1, shape.num_steps):
            cut = limited(shape, steps)
            assert cut is not None and cut.num_steps == steps and cut.eagle_topk == shape.eagle_topk
            assert cut.num_draft_tokens <= shape.num_draft_tokens


# What is reported


@shapes
def test_log_probabilities(shape):
    expected = truth(NAME)
    request = greedy(logprobs=5, temperature=1.2, seed=3, top_k=20, repetition_penalty=1.3)  # reported as if without
    plain = decode(engine_for(NAME), request)
    logits = plain_pass(NAME, [*expected.prompt, *plain.tokens]).logits[0, len(expected.prompt) - 1 : -1]
    logp = logits.log_softmax(-1)
    script = replace(expected.script, answer=plain.tokens, states=None)
    for errs in plans(shape.num_steps).values():
        fast = decode(engine_for(NAME, scripted(script, errs), shape), request)
        for token, row in zip(fast.emitted, logp, strict=True):
            assert token.logprob == pytest.approx(row[token.token_id].item(), abs=1e-4)
            values, ids = row.topk(5)
            assert [i for i, _ in token.top_logprobs] == ids.tolist()
            assert [p for _, p in token.top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)


def test_log_probabilities_are_given_when_asked_for():
    assert {(t.logprob, t.top_logprobs) for t in decode(engine_for(NAME), greedy()).emitted} == {(None, ())}
    only_own = decode(engine_for(NAME), greedy(logprobs=0)).emitted
    assert all(t.logprob is not None and t.top_logprobs == () for t in only_own)


@shapes
@pytest.mark.parametrize("end", [None, 5, 9, 14, 15, 16, 17, 18])
def test_statistics_against_a_recount(shape, end):
    """Including answers that end inside an accepted run: what was not emitted does not count."""
    stops = () if end is None else (truth(NAME).tokens[end],)
    for plan, errs in plans(shape.num_steps).items():
        drafter = Recorder({"r": truth(NAME).script}, errs, layer_ids=LAYERS)
        answer = decode(engine_for(NAME, drafter, shape), greedy(stop_token_ids=stops))
        assert answer.stats == recount(drafter.drafts, answer), plan
        lengths = [len(output.emitted) for output in answer.outputs[1 : 1 + len(drafter.drafts)]]
        assert answer.stats.acceptance_length == pytest.approx(sum(lengths) / len(lengths))


def test_statistics_in_words():
    stats = AcceptanceStats(steps=4, drafted=20, emitted=10, reached=[4, 3, 2, 0], accepted=[3, 2, 1, 0])
    assert stats.acceptance_length == 2.5
    assert stats.acceptance_rates == [3 / 4, 2 / 3, 1 / 2]
    assert AcceptanceStats().acceptance_length == 1.0 and AcceptanceStats().acceptance_rates == []
    both = AcceptanceStats()
    both.add(stats)
    both.add(AcceptanceStats(steps=1, drafted=1, emitted=1, reached=[1], accepted=[0]))
    assert both == AcceptanceStats(5, 21, 11, [5, 3, 2, 0], [3, 2, 1, 0])
    assert stats.steps == 4


# Prompts in pieces


@pytest.mark.parametrize("name", zoo.NAMES)
@pytest.mark.parametrize("size", [1, 7, 8, 13])
def test_prompts_in_pieces(name, size):
    """The drafter checks that it gets every piece once, with the first token of the next one."""
    expected = truth(name)
    request = expected.request(max_tokens=12)
    drafter = scripted(expected.script, plans(5)["in turn"])
    engine = engine_for(name, drafter, CHAIN, chunked_prefill_size=size)
    assert decode(engine, request).tokens == expected.tokens[:12]
    again = replace(request, output_ids=expected.tokens[:5])
    engine = engine_for(name, drafter, TREE, chunked_prefill_size=size)
    assert decode(engine, again).tokens == expected.tokens[5:12]


@pytest.mark.parametrize(("size", "steps"), [(1, 30), (7, 5), (10, 3), (29, 2), (30, 1), (None, 1)])
def test_a_step_reads_no_more_than_a_piece(size, steps):
    engine = engine_for(NAME, chunked_prefill_size=size)
    engine.add(greedy())
    assert [bool(engine.step()) for _ in range(steps)] == [False] * (steps - 1) + [True]


@pytest.mark.parametrize("name", [c.name for c in zoo.CASES if c.image])
def test_an_image_is_never_split(name):
    expected = truth(name, image=True)
    for done in (0, 1, 9):
        request = replace(expected.request(max_tokens=20), output_ids=expected.tokens[:done])
        engine = engine_for(name, scripted(expected.script, plans(5)["in turn"]), chunked_prefill_size=4)
        assert decode(engine, request).tokens == expected.tokens[done:20]


def test_text_after_an_image_does_not_inherit_its_positions():
    seen, text = truth("qwen2.5-vl", image=True), truth("qwen2.5-vl")
    engine = engine_for("qwen2.5-vl", random_drafter("qwen2.5-vl"))
    for one in (seen, text, seen):
        assert decode(engine, one.request(max_tokens=10)).tokens == one.tokens[:10]


# What cannot be served

OUT = zoo.VOCAB
REFUSED = {
    "an empty prompt": ({"prompt_ids": []}, {}, "prompt is empty"),
    "too long a prompt": ({"prompt_ids": [1] * 128}, {}, "128 tokens, the context holds 128 with the answer"),
    "too long with its answer": ({"prompt_ids": [1] * 100, "output_ids": [1] * 28}, {}, "128 tokens"),
    "an id too large": ({"prompt_ids": [1, OUT]}, {}, f"outside the target's 0 to {OUT - 1}"),
    "a negative id": ({"prompt_ids": [-1]}, {}, "outside"),
    "an answer out of range": ({"output_ids": [OUT]}, {}, "outside"),
    "a finished answer": ({"output_ids": [1] * 64}, {}, "64 tokens .* there already"),
    "stop strings without a tokenizer": ({}, {"stop": ("x",)}, "need a tokenizer"),
    "a bias for an id too large": ({}, {"logit_bias": {3: 1.0, OUT: 1.0}}, f"token {OUT}, which is not in the target"),
    "a bias for a negative id": ({}, {"logit_bias": {-1: 1.0}}, "token -1, which is not in the target"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    changes, sampling, message = REFUSED[case]
    engine = engine_for(NAME, random_drafter(NAME))
    with pytest.raises(RequestError, match=message):
        engine.add(replace(greedy(**sampling), **changes))
    assert engine.idle
    assert decode(engine, greedy(max_tokens=5)).tokens == truth(NAME).tokens[:5]


def test_the_longest_prompt_that_is_let_in():
    for count, made in ((127, 1), (126, 2)):
        answer = decode(engine_for(NAME, random_drafter(NAME)), Request("r", [1] * count, SamplingParams()))
        assert len(answer.tokens) == made and answer.finish_reason == "length"


def test_a_bias_that_leaves_nothing_fails_its_request_only():
    engine = engine_for(NAME, random_drafter(NAME), max_running_requests=2)
    bias = dict.fromkeys(range(OUT), float("-inf"))
    answers = run(engine, greedy(logit_bias=bias), replace(greedy(max_tokens=9), id="fine"))
    assert isinstance(answers["r"].error, RequestError) and answers["r"].finish_reason == "error"
    assert answers["fine"].tokens == truth(NAME).tokens[:9]


def test_images_that_the_target_cannot_read_fail_their_request_only():
    seen = truth("qwen2.5-vl", image=True)
    broken = {**seen.images, "pixel_values": seen.images["pixel_values"][:3]}
    engine = engine_for("qwen2.5-vl", random_drafter("qwen2.5-vl"), max_running_requests=2)
    answers = run(engine, replace(seen.request("fine"), images=broken, id="broken"), seen.request("fine"))
    assert isinstance(answers["broken"].error, RequestError) and "image" in str(answers["broken"].error)
    assert answers["fine"].tokens == seen.tokens


# NaN


class Broken:
    """A target of its own whose logits or states turn NaN at some place or token."""

    def __init__(self) -> None:
        self.model = zoo.case(NAME).build()
        self.target = HFTarget(self.model)

    def engine(self, drafter: Any = None, shape: DraftShape | None = None, running: int = 1) -> Engine:
        return Engine(self.target, drafter, shape=shape, context_length=CONTEXT, max_running_requests=running)

    def head_breaks_at(self, place: int) -> None:
        """Logits behind ``place`` and later places are NaN; keys and values stay fine."""
        places: list[torch.Tensor] = []
        self.model.register_forward_pre_hook(
            lambda _, args, kwargs: places.append(kwargs["position_ids"]), with_kwargs=True
        )

        def spoil(_module: Any, _args: Any, logits: torch.Tensor) -> torch.Tensor:
            late = places[-1][..., -logits.shape[1] :, None] >= place
            return logits.masked_fill(late, torch.nan)

        self.model.lm_head.register_forward_hook(spoil)

    def token_breaks(self, token: int) -> None:
        """Whatever sees ``token`` is NaN from there on: keys and values too."""
        with torch.no_grad():
            self.model.get_input_embeddings().weight[token] = torch.nan


def kinds_of_drafters(shape: DraftShape) -> dict[str, Any]:
    right = partial(scripted, replace(truth(NAME).script, states=None))
    return {"none": lambda: None, "in turn": lambda: right(plans(shape.num_steps)["in turn"]), "right": right}


@shapes
@pytest.mark.parametrize("what", ["head", "token"])
def test_nan_ends_its_request_and_nothing_else(what, shape):
    """Exactly the tokens before it come out, then the error; the slot serves the next request as new."""
    expected = truth(NAME)
    at = firsts()[6]
    broken = Broken()
    if what == "head":
        broken.head_breaks_at(len(expected.prompt) + at)
    else:
        broken.token_breaks(expected.tokens[at])
    for label, drafter in kinds_of_drafters(shape).items():
        engine = broken.engine(drafter(), shape)
        for _ in "twice":
            answer = decode(engine, expected.request())
            assert isinstance(answer.error, NonFiniteLogitsError), label
            assert f"output token {at + 1} " in str(answer.error)
            assert answer.tokens == expected.tokens[: at + 1]
            assert answer.finish_reason == "error" and answer.outputs[-1].emitted == ()
            assert decode(engine, expected.request(max_tokens=at)).tokens == expected.tokens[:at]


@pytest.mark.parametrize("drafter", ["none", "in turn", "right"])
def test_nan_in_a_prompt(drafter):
    expected = truth(NAME)
    broken = Broken()
    broken.token_breaks(155)
    engine = broken.engine(kinds_of_drafters(CHAIN)[drafter](), CHAIN)
    request = replace(expected.request(), prompt_ids=[*expected.prompt, 155, 3, *[7] * 60])
    answer = decode(engine, request)
    assert isinstance(answer.error, NonFiniteLogitsError) and answer.tokens == []
    assert decode(engine, expected.request()).tokens == expected.tokens


@pytest.mark.parametrize("drafter", ["none", "in turn"])
def test_nan_in_a_prompt_beside_others(drafter):
    """A slot that held NaN is taken by a short prompt beside a long one: its rows behind the prompt are masked only."""
    expected, short = truth(NAME), truth(NAME, length=1, tokens=24)
    broken = Broken()
    broken.token_breaks(155)
    scripts = {id: replace(one.script, states=None) for id, one in (("long", expected), ("short", short))}
    engine = broken.engine(scripted(scripts, plans(5)["in turn"]) if drafter != "none" else None, CHAIN, running=2)
    bad = replace(expected.request("bad"), prompt_ids=[*expected.prompt, 155, *[7] * 60])
    long = replace(expected.request("long"), output_ids=expected.tokens[:30])
    answers = run(engine, long, bad, short.request("short"))
    assert answers["bad"].error is not None
    assert answers["long"].tokens == expected.tokens[30:]
    assert answers["short"].tokens == short.tokens


@shapes
def test_nan_beside_others(shape):
    """The request that breaks is longer and shorter than its company: masked NaN still multiplies by 0."""
    expected = truth(NAME)
    at = firsts()[6]
    broken = Broken()
    broken.token_breaks(expected.tokens[at])
    others = [truth(NAME, length=length, tokens=24) for length in (9, 30)]
    others = [o for o in others if expected.tokens[at] not in o.tokens[:-1] + o.prompt]
    scripts = {"r": replace(expected.script, states=None)}
    requests = [expected.request("r")]
    for number, other in enumerate(others):
        stop = other.tokens.index(expected.tokens[at]) if expected.tokens[at] in other.tokens else len(other.tokens)
        requests.append(other.request(str(number), max_tokens=stop))
        scripts[str(number)] = replace(other.script, states=None)
    assert len(requests) > 1
    for errs in plans(shape.num_steps).values():
        answers = run(broken.engine(scripted(scripts, errs), shape, running=3), *requests)
        assert answers["r"].tokens == expected.tokens[: at + 1] and answers["r"].error is not None
        for number, other in enumerate(others):
            assert answers[str(number)].tokens == other.tokens


@shapes
@pytest.mark.parametrize("running", [1, 2])
def test_nan_behind_a_rejected_draft_token_is_not_met(shape, running):
    """Plain decoding never reads the broken token, so drafting it must not be an error either."""
    expected = truth(NAME)
    broken = Broken()
    for token in range(zoo.VOCAB):
        if token not in expected.tokens + expected.prompt:
            broken.token_breaks(token)
    assert decode(broken.engine(), expected.request()).tokens == expected.tokens
    scripts = {id: replace(expected.script, states=None) for id in ("r", "s")}
    longer = replace(expected.request("s"), output_ids=expected.tokens[:20])
    for plan in ("in turn", "wrong at 2"):
        errs = plans(shape.num_steps)[plan]
        engine = broken.engine(scripted(scripts, errs), shape, running)
        answers = run(engine, expected.request("r"), longer)
        assert answers["r"].error is None
        assert answers["r"].tokens == expected.tokens
        assert answers["s"].tokens == expected.tokens[20:]


# Leaving


@shapes
def test_an_abort_frees_the_slot(shape):
    expected = truth(NAME)
    engine = engine_for(NAME, scripted({"r": expected.script, "next": expected.script}, plans(4)["in turn"]), shape)
    for steps in range(5):
        engine.add(expected.request("r"))
        engine.add(expected.request("next", max_tokens=3))
        seen = [token.token_id for _ in range(steps) for output in engine.step() for token in output.emitted]
        assert seen == expected.tokens[: len(seen)]
        engine.abort("r")
        engine.abort("r")
        rest = {"next": Answer()}
        collect(engine, rest)
        assert rest["next"].tokens == expected.tokens[:3]


BUGS: dict[str, tuple[Any, str, str, str, Callable[[pytest.MonkeyPatch], None]]] = {
    "tokens behind the end": (
        Engine, "_emit", "if sequence.finish_reason is not None", "if False",
        lambda patch: test_endings_inside_an_accepted_run(CHAIN),
    ),
    "what was dropped is counted": (
        Engine, "_take", "len(output.emitted)", "len(tokens)",
        lambda patch: test_statistics_against_a_recount(CHAIN, 9),
    ),
    "log-probabilities of the first nodes": (
        Engine, "_emit", "logits[row, path]", "logits[row, : len(path)]",
        lambda patch: test_log_probabilities(TREE),
    ),
    "NaN stays in the slot": (
        Engine, "_fail", "self.runner.clear(slot)", "pass",
        lambda patch: test_nan_in_a_prompt_beside_others("none"),
    ),
    "NaN of a draft stays": (
        Engine, "_alone", "self.runner.drop_draft(sequence)", "pass",
        lambda patch: test_nan_behind_a_rejected_draft_token_is_not_met(TREE, 1),
    ),
    "a broken draft is an error": (
        Engine, "_take", "return self._alone(sequence)", "return self._fail(sequence, no_choice(finite, 0))",
        lambda patch: test_nan_behind_a_rejected_draft_token_is_not_met(TREE, 1),
    ),
    "a slot is lost": (
        Engine, "_fail", "self.scheduler.finish(sequence, 0)", "pass",
        lambda patch: test_nan_ends_its_request_and_nothing_else("head", CHAIN),
    ),
    "the first token of a piece is forgotten": (
        Runner, "_feed", "min(p.count, len(p.sequence.ids) - 1 - p.start)", "p.count - 1",
        lambda patch: test_prompts_in_pieces("llama", 7),
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_these_tests_see(bug, monkeypatch):
    *place, test = BUGS[bug]
    plant(monkeypatch, *place)
    with pytest.raises((AssertionError, Wrong)):
        test(monkeypatch)


def test_engines_may_share_a_target():
    """Each asks for its own drafter's layers, and a plain one for none, whoever came last."""
    text = truth("llama")
    target = HFTarget(zoo.case("llama").model)
    first = Engine(target, ScriptedDrafter({"r": text.script}), shape=CHAIN, context_length=CONTEXT)
    other = Engine(target, ScriptedDrafter({}, layer_ids=(1, 3)), shape=CHAIN, context_length=CONTEXT)
    plain = Engine(target, context_length=CONTEXT)
    assert [tokens(engine, text.request()) for engine in (first, plain)] == [text.tokens] * 2
    assert other.idle


def test_layers_are_captured_for_a_drafter_only(monkeypatch):
    """And for one always the same, in plain steps too: other layers would be another compiled step."""
    text = truth("llama")
    target = HFTarget(zoo.case("llama").model)
    drafting = Engine(target, ScriptedDrafter({"r": text.script}), shape=CHAIN, context_length=CONTEXT)
    plain = Engine(target, context_length=CONTEXT)
    seen = []
    capture = target.set_eagle3_layers_to_capture
    monkeypatch.setattr(target, "set_eagle3_layers_to_capture", lambda layers: seen.append(layers) or capture(layers))
    for engine, speculate, layers in ((plain, True, None), (drafting, False, LAYERS), (drafting, True, LAYERS)):
        assert tokens(engine, replace(text.request(), speculate=speculate)) == text.tokens
        assert set(seen) == {layers}
        seen.clear()


def test_a_request_that_cannot_even_start_takes_no_slot(monkeypatch):
    text = truth("llama")
    engine = Engine(HFTarget(zoo.case("llama").model), context_length=CONTEXT)
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(engine, "stop_ids", lambda sampling: (*None,))
        tokens(engine, text.request())
    assert tokens(engine, text.request()) == text.tokens


def test_the_context_is_never_longer_than_the_targets():
    target = HFTarget(zoo.case("llama").model)
    with pytest.raises(UsageError, match="ends at 512"):
        Engine(target, context_length=513)


@pytest.mark.parametrize("size", [0, -3])
def test_a_piece_of_nothing_would_never_end(size):
    with pytest.raises(UsageError, match=f"chunked_prefill_size must be at least 1, got {size}"):
        engine_for(NAME, chunked_prefill_size=size)


def test_ids_of_requests_must_differ():
    text = truth("llama")
    engine = Engine(HFTarget(zoo.case("llama").model), context_length=CONTEXT)
    engine.add(text.request("a"))
    with pytest.raises(RequestError, match="'a'"):
        engine.add(text.request("a"))
    engine.step()
    with pytest.raises(RequestError, match="'a'"):
        engine.add(text.request("a"))
    engine.abort("a")
    engine.add(text.request("a"))


def tokens(engine: Engine, request: Request) -> list[int]:
    engine.add(request)
    found = []
    while not engine.idle:
        found += [token.token_id for output in engine.step() for token in output.emitted]
    return found
