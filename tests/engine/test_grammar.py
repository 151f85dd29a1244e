"""Constrained output: always what was asked for, and the same tokens with and without speculation."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
import zoo
from engine.harness import CHAIN, TREE, Answer, collect, decode, engine_for, plain_pass, random_drafter, run
from letters import END, tokenizer
from llguidance import LLMatcher
from schemas import schemas

from eyas.core import DraftShape, Request, RequestError, SamplingParams, StructuredOutputsParams
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.engine import grammar as module
from eyas.engine.engine import Engine
from eyas.engine.grammar import Grammar, Grammars, has
from eyas.engine.policy import Decision
from eyas.engine.scheduler import slot_length

SCHEMAS = schemas(200)
NAME, CONTEXT, TOKENS = "llama", 256, 160
SHAPES = pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])


def engine(shape: DraftShape | None = None, drafter: Eagle3Drafter | None = None, **settings: Any) -> Engine:
    if shape is not None and drafter is None:
        drafter = random_drafter(NAME)
    defaults = {"tokenizer": tokenizer(), "eos_ids": (END,), "context_length": CONTEXT, "max_running_requests": 32}
    return engine_for(NAME, drafter, shape, **{**defaults, **settings})


def request(id: Any, asked: dict[str, Any] | None, **sampling: Any) -> Request:
    """Greedy or sampled by turns, each with a prompt of its own."""
    number = sum(map(ord, str(id)))
    drawn = {"temperature": 1.0, "seed": number} if number % 2 else {}
    outputs = StructuredOutputsParams(**asked) if asked is not None else None
    settings = {"max_tokens": TOKENS, "structured_outputs": outputs, **drawn, **sampling}
    return Request(str(id), zoo.case(NAME).prompt(8 + number % 7, number), SamplingParams(**settings))


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), zoo.VOCAB, (END,))


@cache
def plain() -> dict[str, Answer]:
    return run(engine(), *(request(n, {"json": schema}) for n, schema in enumerate(SCHEMAS)))


def test_all_that_is_finished_is_valid():
    answers = plain()
    assert Counter(answer.finish_reason for answer in answers.values())["stop"] >= 180
    assert {answer.finish_reason for answer in answers.values()} == {"stop", "length"}
    for id, answer in answers.items():
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), SCHEMAS[int(id)])
        else:
            assert len(answer.tokens) == TOKENS
    kinds = {type(json.loads(answer.text)) for answer in answers.values() if answer.finish_reason == "stop"}
    assert kinds == {dict, list, str, int, float, bool, type(None)}
    assert len({answer.text for answer in answers.values()}) > 140, "they all say the same"


@SHAPES
def test_speculation_changes_nothing(shape):
    """Half of the schemas as chains, the other half as trees, greedy and sampled in one batch."""
    chosen = [n for n in range(len(SCHEMAS)) if n // 2 % 2 == (shape is TREE)]
    answers = run(engine(shape), *(request(n, {"json": SCHEMAS[n]}) for n in chosen))
    assert {id: answer.tokens for id, answer in answers.items()} == {str(n): plain()[str(n)].tokens for n in chosen}
    assert all(answers[str(n)].finish_reason == plain()[str(n)].finish_reason for n in chosen)
    accepted = sum(sum(answer.stats.accepted) for answer in answers.values())
    assert accepted > 300, "nothing was drafted that could be accepted"


@pytest.mark.parametrize("number", [0, 6, 14])
def test_greedy_choices_are_those_of_an_independent_pass(number):
    """One forward over everything, and one matcher that is never rolled back."""
    asked = request(number, {"json": SCHEMAS[number]}, temperature=0)
    matcher, ids = grammars().compile(asked.sampling.structured_outputs).deep_copy(), list(asked.prompt_ids)
    tokens = decode(engine(TREE), asked).tokens
    assert len(tokens) > 3
    for token in tokens:
        allowed = [
            bool(bit) for bit in np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        ]
        logits = plain_pass(NAME, ids).logits[0, -1]
        best = max((v for v in range(zoo.VOCAB) if allowed[v]), key=lambda v: logits[v])
        assert token == best
        ids.append(token)
        assert token == END or matcher.consume_token(token)


ASKED: dict[str, tuple[dict[str, Any], Any]] = {
    "object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    "regex": ({"regex": "(ab|c[0-9]{2,4}){1,6}!"}, lambda text: re.fullmatch("(ab|c[0-9]{2,4}){1,6}!", text)),
    "choice": ({"choice": ["yes", "no", 'a "b"', "back\\slash", "two\nlines"]}, lambda text: len(text) < 12),
    "lark": (
        {"grammar": 'start: sum\nsum: NUM ("+" NUM){1,4}\nNUM: /[0-9]{1,3}/'},
        lambda text: re.fullmatch("([0-9]{1,3}[+]){1,4}[0-9]{1,3}", text),
    ),
    "gbnf": (
        {"grammar": 'root ::= item (", " item){2,5}\nitem ::= "a" | "bb" [0-9]'},
        lambda text: text.count(", ") >= 2,
    ),
    "schema as text": (
        {"json": '{"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 5}'},
        lambda text: 3 <= len(json.loads(text)) <= 5,
    ),
    "a schema for anything": ({"json": {}}, lambda text: json.loads(text) is not ...),
}


@pytest.mark.parametrize("kind", ASKED)
def test_every_kind_of_constraint(kind):
    asked, fits = ASKED[kind]
    requests = [request(f"{kind}{n}", asked, max_tokens=200) for n in range(4)]
    expected = run(engine(), *requests)
    drafted = run(engine(TREE), *requests)
    assert [drafted[r.id].tokens for r in requests] == [expected[r.id].tokens for r in requests]
    finished = [answer.text for answer in expected.values() if answer.finish_reason == "stop"]
    assert finished or kind in ("object", "a schema for anything"), "none was finished"
    assert all(fits(text) for text in finished)
    if "choice" in asked:
        assert set(finished) <= set(asked["choice"])


@SHAPES
def test_batches_of_constrained_and_free_requests(shape):
    """Each says what it says alone; those that are not drafted for, too."""
    requests = [request(n, {"json": SCHEMAS[n]} if n % 3 else None, max_tokens=40) for n in range(12)]
    requests = [replace(r, speculate=n % 5 != 0) for n, r in enumerate(requests)]
    together = run(engine(shape), *requests)
    for r in requests:
        assert together[r.id].tokens == decode(engine(), r).tokens, r.id


def test_sequences_that_are_put_back_go_on_where_they_were():
    requests = [request(n, {"json": SCHEMAS[n]}, max_tokens=100) for n in (2, 8, 12, 16, 20, 24)]
    small = engine(TREE, context_length=160, kv_rows=2 * slot_length(200), max_running_requests=6)
    answers = run(small, *requests)
    assert small.scheduler.preemptions > 0
    for r in requests:
        assert answers[r.id].tokens == decode(engine(context_length=160), r).tokens


def test_prompts_that_are_there_already():
    asked = request("a", {"json": SCHEMAS[12]})
    asked = replace(asked, prompt_ids=zoo.case(NAME).prompt(40))
    warm = engine(CHAIN)
    first = decode(warm, asked)
    again = decode(warm, replace(asked, id="b"))
    assert again.outputs[-1].cached_tokens > 16
    assert again.tokens == first.tokens


def test_an_answer_goes_on_as_if_it_had_never_stopped():
    asked = request(12, {"json": SCHEMAS[12]})
    whole = plain()["12"].tokens
    assert len(whole) > 20
    for done in (1, 7, len(whole) - 1):
        resumed = replace(asked, output_ids=whole[:done])
        for made in (engine(), engine(TREE)):
            assert decode(made, resumed).tokens == whole[done:]
    with pytest.raises(RequestError, match="complete: its grammar lets nothing follow"):
        engine().add(replace(asked, output_ids=whole))
    with pytest.raises(RequestError, match="Token 1 of the answer that is there already is not in its grammar"):
        engine().add(replace(asked, output_ids=[whole[0], END]))


# Ends


def both(asked: Request, shape: DraftShape = TREE) -> Answer:
    """One answer, which is the same with and without a drafter."""
    answer, drafted = decode(engine(), asked), decode(engine(shape), asked)
    assert (drafted.tokens, drafted.text, drafted.finish_reason) == (answer.tokens, answer.text, answer.finish_reason)
    return answer


@SHAPES
def test_ends_are_chosen_only_where_the_answer_may_end(shape):
    """The end is all that the target wants to say."""
    answer = both(request(1, {"regex": "(ab){3,}"}, logit_bias={END: 100}), shape)
    assert answer.text == "ababab" and answer.tokens[-1] == END and answer.finish_reason == "stop"


def test_where_nothing_may_follow_no_end_is_waited_for():
    answer = both(request(1, {"regex": "[0-9]{4}"}))
    assert len(answer.text) == 4 and END not in answer.tokens and answer.finish_reason == "stop"
    assert both(request(1, {"regex": ""})).tokens == [END]


@pytest.mark.parametrize("eos_ids", [(END,), (END, END + 1)])
def test_targets_with_one_end_or_several(eos_ids):
    for regex, finish in (("[ab]{5}", "stop"), ("a+", "length")):
        asked = request(1, {"regex": regex}, max_tokens=12, logit_bias=dict.fromkeys((END, END + 1), -100))
        expected = decode(engine(eos_ids=eos_ids), asked)
        assert decode(engine(TREE, eos_ids=eos_ids), asked).tokens == expected.tokens
        assert expected.finish_reason == finish and re.fullmatch(regex, expected.text)
    asked = request(1, {"regex": "[ab]{2,}"}, max_tokens=12, logit_bias={END + 1: 100})
    expected = decode(engine(eos_ids=eos_ids), asked)
    assert decode(engine(TREE, eos_ids=eos_ids), asked).tokens == expected.tokens
    assert (expected.tokens[2:] == [END + 1]) == (END + 1 in eos_ids), (
        "where it is no end it is no token of the grammar"
    )


def test_min_tokens_hold_back_the_end_but_not_beyond_the_grammar():
    longer = both(request(1, {"regex": "a+"}, min_tokens=20, logit_bias={END: 50}))
    assert longer.text == "a" * 20 and longer.tokens[-1] == END
    whole = both(request(1, {"regex": "abc"}, min_tokens=20))
    assert whole.text == "abc" and whole.finish_reason == "stop"
    assert both(request(1, {"regex": ""}, min_tokens=5)).tokens == [END]


def test_ignoring_the_end_ends_with_the_grammar_all_the_same():
    answer = both(request(1, {"regex": "a{2,}"}, ignore_eos=True, logit_bias={END: 50}))
    assert answer.text == "aa" and answer.finish_reason == "stop"
    assert both(request(1, {"json": SCHEMAS[3]}, ignore_eos=True)).finish_reason == "stop"


def test_what_else_ends_an_answer():
    assert both(request(1, {"regex": "[a-c]{30}"}, max_tokens=7)).finish_reason == "length"
    cut = both(request(1, {"regex": "aab[a-z]{9}"}, stop=("ab",)))
    assert cut.text == "a" and cut.finish_reason == "stop"
    (comma,) = tokenizer()(",")["input_ids"]
    stopped = both(request(1, {"regex": "a+,b+"}, stop_token_ids=(comma,), logit_bias={comma: 3}))
    assert stopped.tokens[-1] == comma and set(stopped.text) == {"a"}


SETTINGS: dict[str, dict[str, Any]] = {
    "cuts": {"temperature": 1.5, "top_k": 5, "top_p": 0.8, "min_p": 0.02},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.5},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    "bias": {"temperature": 1.0, "logit_bias": {3: 4.0, 5: float("-inf"), END: -3}},
    "min_tokens": {"temperature": 1.0, "min_tokens": 25},
    "log-probabilities": {"temperature": 1.0, "logprobs": 3},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_with_all_other_settings(setting):
    for n in (2, 13):
        both(request(n, {"json": SCHEMAS[n]}, max_tokens=60, **SETTINGS[setting]), TREE if n == 2 else CHAIN)


# Drafts


def test_only_one_way_to_go_on_is_drafted_right_by_any_drafter():
    """A drafter that knows nothing has all its tokens accepted where the grammar leaves one choice."""
    text = "a fixed text, which is drafted by nobody who knows it"
    for shape in (CHAIN, TREE):
        answer = decode(engine(shape), request(1, {"choice": [text]}))
        assert answer.text == text
        steps = answer.stats.steps
        assert sum(answer.stats.accepted) >= shape.num_steps * (steps - 1) > 0


def test_a_draft_vocabulary_without_what_may_follow():
    """There the draft ends, and nothing is wrong with it."""
    drafter = random_drafter(NAME, "reduced vocabulary")
    ids = drafter.model.draft_to_target.tolist()
    rare = next(c for c in "kjzqxvwy" if tokenizer()(c)["input_ids"][0] not in ids)
    common = next(c for c in "abcdefghijklmnop" if tokenizer()(c)["input_ids"][0] in ids)
    asked = request(1, {"regex": f"({common}{{3}}{rare}){{5}}"})
    for shape in (CHAIN, TREE):
        answer = decode(engine(shape, random_drafter(NAME, "reduced vocabulary")), asked)
        assert answer.text == (common * 3 + rare) * 5
        assert sum(answer.stats.accepted) > 0
    for n in (4, 12):
        r = request(n, {"json": SCHEMAS[n]})
        assert decode(engine(TREE, random_drafter(NAME, "reduced vocabulary")), r).tokens == plain()[str(n)].tokens


class Whims:
    """Changes its mind at every step."""

    shapes = (CHAIN, TREE)

    def __init__(self) -> None:
        self._random = Random(3)

    def follow(self) -> bool:
        return True

    def decide(self, view: Any) -> Decision:
        return Decision(self._random.choice([None, CHAIN, TREE, TREE]), "a whim", follow=True)

    def observe(self, report: Any) -> None: ...


def test_a_policy_may_change_its_mind_at_any_step():
    chosen = range(0, 40, 3)
    answers = run(engine(TREE, policy=Whims()), *(request(n, {"json": SCHEMAS[n]}) for n in chosen))
    assert all(answers[str(n)].tokens == plain()[str(n)].tokens for n in chosen)


def test_nodes_are_what_a_matcher_says_that_has_seen_nothing_else():
    """Random walks over drafts with right, wrong and ended branches, in any order."""
    draw = Random(5)
    for schema in SCHEMAS[:30:3]:
        compiled = grammars().compile(StructuredOutputsParams(json=schema))
        state, accepted = Grammar(compiled, (END,), 5), []
        for _ in range(12):
            paths = [()]
            for _ in range(10):
                above = draw.choice(paths)
                options = [v for v in range(zoo.VOCAB) if has(state.node(above).bits, v)] or [0]
                paths.append((*above, draw.choice(options if draw.random() < 0.8 else range(zoo.VOCAB))))
            for path in draw.sample(paths, len(paths)):
                assert_node(compiled, accepted, path, state.node(path))
            alive = [v for v in range(zoo.VOCAB) if has(state.node(()).bits, v)]
            token = draw.choice(alive)
            if token == END or state.accept(token):
                break
            accepted.append(token)


def assert_node(compiled: LLMatcher, accepted: list[int], path: tuple[int, ...], node: Any) -> None:
    fresh = compiled.deep_copy()
    assert fresh.consume_tokens(accepted)
    ended = False
    for place, token in enumerate(path):
        if ended or fresh.validate_tokens([token]) == 0:
            assert node.fault is not None and not node.bits.any()
            return
        ended = token == END or (fresh.consume_token(token) and only_end(fresh))
        assert place == len(path) - 1 or ended or node is not None
    assert node.fault is None and node.ended == ended
    assert not node.bits.any() if ended else node.bits.tobytes() == fresh.compute_bitmask()[: node.bits.nbytes]


def only_end(matcher: LLMatcher) -> bool:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return set(bits.nonzero()[0].tolist()) <= {END}


# What goes wrong


UNSPELLABLE = {"json": {"type": "array", "items": {"const": "aaÜ"}, "minItems": 2}}  # this tokenizer lacks the bytes


@SHAPES
def test_a_matcher_that_fails_ends_its_own_request_only(shape):
    requests = [request(n, {"json": SCHEMAS[n]} if n % 2 else None, max_tokens=30) for n in range(6)]
    bad = request("bad", UNSPELLABLE)
    for made in (engine(shape), engine()):
        answers = run(made, *requests[:3], bad, *requests[3:])
        assert isinstance(answers["bad"].error, RequestError)
        assert "cannot be followed beyond output token" in str(answers["bad"].error)
        assert answers["bad"].finish_reason == "error"
        assert all(answers[r.id].tokens == decode(engine(), r).tokens for r in requests)


def test_a_matcher_that_breaks_is_made_anew():
    """What broke it may be a draft's token that is never chosen."""
    state = Grammar(grammars().compile(StructuredOutputsParams(regex="[ab]+")), (END,), 5)
    a, b = tokenizer()("a")["input_ids"] + tokenizer()("b")["input_ids"]
    state.accept(a)
    state._matcher.consume_token(zoo.VOCAB - 1)  # into its error state
    assert state._matcher.is_error()
    assert has(state.node((b, b)).bits, a)
    assert not state.accept(b)


def test_settings_that_leave_nothing_end_their_own_request_only():
    made = Engine(
        engine().target,
        random_drafter(NAME),
        shape=CHAIN,
        context_length=64,
        tokenizer=tokenizer(),
        eos_ids=(END,),
        max_running_requests=2,
    )
    (z,) = tokenizer()("z")["input_ids"]
    bad = request("bad", {"regex": "aaaaz"}, logit_bias={z: float("-inf")}, max_tokens=20)
    good = request(2, {"regex": "[a-z]{20}"}, max_tokens=30)
    answers = run(made, bad, good)
    assert "structured_outputs rule out" in str(answers["bad"].error)
    assert answers[good.id].tokens == decode(engine(), good).tokens


def test_requests_that_are_dropped_leave_nothing():
    made = engine(TREE)
    requests = [request(n, {"json": SCHEMAS[n]}) for n in (2, 8, 12)]
    answers = {r.id: Answer() for r in requests}
    for r in requests:
        made.add(r)
    for _ in range(3):
        for output in made.step():
            answers[output.request_id].outputs.append(output)
    made.abort("8")
    collect(made, answers)
    assert made.idle and answers["12"].tokens == plain()["12"].tokens


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no JSON": ({"json": "{"}, "The JSON schema cannot be used: Expecting property name"),
    "no schema": ({"json": "[1]"}, "it must be an object"),
    "unknown type": ({"json": {"type": "strin"}}, "strin"),
    "unsupported": ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    "far away": ({"json": {"$ref": "https://example.org/x"}}, "The JSON schema cannot be used"),
    "dangling": ({"json": {"$ref": "#/$defs/a"}}, "The JSON schema cannot be used"),
    "impossible": ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "The JSON schema"),
    "too deep": ({"json": '{"items":' * 5000 + "{}" + "}" * 5000}, "The JSON schema cannot be used"),
    "open": ({"regex": "(a"}, "The regex cannot be used"),
    "backreference": ({"regex": r"(a)\1"}, "The regex cannot be used"),
    "endless": ({"grammar": "start: start"}, "The grammar"),
    "no rule": ({"grammar": 'start: "a" other'}, "The grammar cannot be used"),
    "no grammar": ({"grammar": ""}, "The grammar cannot be used"),
    "no GBNF": ({"grammar": "root ::= ("}, "The grammar cannot be used"),
    "too large": ({"choice": ["a" * 70_000, "b" * 70_000]}, "it has more than 128 KiB"),
    "too many": (
        {"json": {"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(4)]} for i in range(8)]}},
        "large",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_constraint_is_refused_with_the_reason(what):
    asked, reason = REFUSED[what]
    made = engine()
    with pytest.raises(RequestError, match=re.escape(reason)) as caught:
        made.add(request(1, asked))
    assert made.idle and len(str(caught.value)) < 500 and "\n" not in str(caught.value)


def test_tokenizers_without_bytes_are_refused():
    from cli.tiny import tokenizer as words

    with pytest.raises(RequestError, match="This target's tokenizer cannot be used for structured outputs"):
        engine(tokenizer=words()).add(request(1, {"json_object": True}))
    with pytest.raises(RequestError, match="Structured outputs need a tokenizer"):
        engine(tokenizer=None).add(request(1, {"json_object": True}))
    with pytest.raises(RequestError, match="need a token that ends an answer, and this engine has none"):
        engine(eos_ids=()).add(request(1, {"json_object": True}))


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'eyas\[serve\]'"):
        engine().add(request(1, {"json_object": True}))


def test_the_package_is_imported_by_those_who_need_it_only():
    script = "import eyas, eyas.server.app, eyas.engine.grammar, sys; sys.exit('llguidance' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_constraints_are_compiled_once(monkeypatch):
    counted = Grammars(tokenizer(), zoo.VOCAB, (END,))
    made: list[Any] = []
    inner = counted._matcher
    monkeypatch.setattr(counted, "_matcher", lambda asked: made.append(asked) or inner(asked))
    monkeypatch.setattr(module, "KEPT", 2)
    first, second, third = (StructuredOutputsParams(regex=r) for r in ("a", "b", "c"))
    for asked in (first, first, second, first, third, first, second):
        counted.compile(asked)
    assert made == [first, second, third, second]
