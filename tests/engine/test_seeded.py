"""Seed-coupled sampling: the text depends on target, prompt and seed, never on what was drafted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import zoo
from engine.harness import (
    BUSH,
    CHAIN,
    TREE,
    accept_lengths,
    decode,
    engine_for,
    plain_pass,
    plant,
    random_drafter,
    script,
    scripted,
    truth,
)
from scripted import Wrong, plans

from eyas.core import Request, SamplingParams
from eyas.engine import engine
from eyas.engine.sequence import Sequence
from eyas.speculation import sampling
from eyas.speculation.sampling import TokenHistory, needs_history, perturbed

TOKENS = 40
STOPS = tuple(range(0, zoo.WORDS, 9))  # one word in nine: an answer reaches one soon
SETTINGS = {
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 2.5},
    "top-k": {"temperature": 1.5, "top_k": 4},
    "top-p": {"temperature": 1.5, "top_p": 0.7},
    "min-p": {"temperature": 1.5, "min_p": 0.1},
    "repetition penalty": {"temperature": 1.0, "repetition_penalty": 1.4},
    "presence and frequency": {"temperature": 1.0, "presence_penalty": 1.1, "frequency_penalty": 0.6},
    "bias": {"temperature": 1.0, "logit_bias": {3: 4.0, 5: -3.0, **dict.fromkeys(range(40, 60), float("-inf"))}},
    "min_tokens": {"temperature": 1.0, "min_tokens": 20, "stop_token_ids": STOPS},
    "greedy with penalties": {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0},
    "everything": {
        "temperature": 1.4,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.3,
        "logit_bias": {3: 4.0, 5: float("-inf")},
        "min_tokens": 20,
        "stop_token_ids": STOPS,
    },
}
INPUTS = {
    "llama": ("llama", False),
    "gemma3": ("gemma3", False),
    "deepseek-v3": ("deepseek-v3", False),
    "qwen2.5-vl with an image": ("qwen2.5-vl", True),
}
cases = pytest.mark.parametrize("case", INPUTS)
settings = pytest.mark.parametrize("setting", SETTINGS)


def request_for(case: str, setting: str, seed: int = 7, max_tokens: int = TOKENS) -> Request:
    return truth(*INPUTS[case]).request(seed=seed, max_tokens=max_tokens, **SETTINGS[setting])


@cache
def plain(case: str, setting: str, seed: int = 7) -> list[int]:
    return decode(engine_for(INPUTS[case][0]), request_for(case, setting, seed)).tokens


@settings
@cases
def test_plain_decoding_is_the_choice_of_an_independent_pass(case, setting):
    request, tokens = request_for(case, setting), plain(case, setting)
    params, prompt = request.sampling, list(request.prompt_ids)
    assert len(tokens) == TOKENS or tokens[-1] in STOPS
    assert len(set(tokens)) >= min(15, len(tokens) // 2)
    logits = plain_pass(INPUTS[case][0], [*prompt, *tokens], request.images).logits[0, len(prompt) - 1 : -1]
    for index, token in enumerate(tokens):
        history = None
        if needs_history(params):
            history = TokenHistory.from_tokens(prompt, tokens[:index], logits.shape[-1])
        row = logits[index : index + 1]
        scores = perturbed(row, params, [index], history=history, stop_ids=params.stop_token_ids)
        assert scores.argmax(-1).tolist() == [token]


@settings
@cases
def test_scripted_errors_change_nothing(case, setting):
    request, expected, name = request_for(case, setting), plain(case, setting), INPUTS[case][0]
    known = script(name, request.prompt_ids, request.images, expected)
    for shape in (CHAIN, TREE):
        answer = decode(engine_for(name, scripted(known, plans(shape.num_steps)["in turn"]), shape), request)
        assert answer.tokens == expected
        assert len(accept_lengths(answer.stats)) >= min(shape.num_steps, len(expected) // 6)


@settings
@cases
def test_random_drafters_change_nothing(case, setting):
    request, expected, name = request_for(case, setting, max_tokens=24), plain(case, setting), INPUTS[case][0]
    kind, shape = (("standard", CHAIN), ("reduced vocabulary", TREE))[list(SETTINGS).index(setting) % 2]
    answer = decode(engine_for(name, random_drafter(name, kind), shape), request)
    assert answer.tokens == expected[:24]
    assert answer.stats.steps > 0


def test_noise_shared_with_the_drafter_makes_even_a_random_one_agree_at_times():
    request = request_for("llama", "hot")
    accepted = decode(engine_for("llama", random_drafter("llama"), BUSH), request).stats.accepted
    assert accepted[0] > 0


@cases
def test_seeds(case):
    assert len({tuple(plain(case, "temperature", seed)) for seed in (7, 8, -1, 2**64 - 2)}) == 4
    again = decode(engine_for(INPUTS[case][0]), request_for(case, "temperature", 8)).tokens
    assert again == plain(case, "temperature", 8)


def test_unseeded_requests_differ():
    prompt = truth("llama").prompt
    one = engine_for("llama")
    texts = [decode(one, Request("r", prompt, SamplingParams(temperature=1.0, max_tokens=10))).tokens for _ in "ab"]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("setting", ["greedy with penalties", "temperature", "everything"])
@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen2.5-vl with an image"])
@pytest.mark.thorough
def test_an_answer_goes_on_as_if_it_had_never_stopped(case, setting):
    """From every few tokens on, plain and speculative."""
    request, expected, name = request_for(case, setting), plain(case, setting), INPUTS[case][0]
    known = script(name, request.prompt_ids, request.images, expected)
    for done in range(0, len(expected), 13):
        again = replace(request, output_ids=expected[:done])
        assert decode(engine_for(name), again).tokens == expected[done:]
        for shape in (CHAIN, TREE):
            drafter = scripted(known, plans(shape.num_steps)["in turn"])
            assert decode(engine_for(name, drafter, shape), again).tokens == expected[done:]
        assert decode(engine_for(name, random_drafter(name), TREE), again).tokens == expected[done:]


def test_tokens_of_logits_and_of_states_agree():
    """A check of the checks: the independent pass sees a wrong index and a wrong history."""
    request, tokens = request_for("llama", "everything"), plain("llama", "everything")
    prompt, params = list(request.prompt_ids), request.sampling
    logits = plain_pass("llama", [*prompt, *tokens]).logits[0, len(prompt) - 1 : -1]
    stale = TokenHistory.from_tokens(prompt, [], logits.shape[-1])
    for indices, history in ((range(1, len(tokens) + 1), stale), (range(len(tokens)), stale)):
        scores = perturbed(logits, params, list(indices), history=history, stop_ids=params.stop_token_ids)
        assert scores.argmax(-1).tolist() != tokens


BUGS = {
    "noise of the root at every node": (sampling, "_scores", "+ depths).flatten", "+ 0 * depths).flatten"),
    "history of the root at every node": (sampling, "_scores", ".extended(paths[group.members][0])", ""),
    "history that is not kept up": (Sequence, "append", "self.history.with_output([token])", "self.history"),
    "noise of another index": (sampling, "_group", "member.output_index for", "member.output_index + 1 for"),
    "rows for depths": (engine, "choose", "if draft.depths is None else draft.depths", ""),
}


@pytest.mark.parametrize("bug", BUGS)
def test_these_tests_see(bug, monkeypatch):
    expected = plain("llama", "everything")  # from before
    plant(monkeypatch, *BUGS[bug])
    request = request_for("llama", "everything")
    known = script("llama", request.prompt_ids, None, expected)
    with pytest.raises((AssertionError, Wrong)):
        answer = decode(engine_for("llama", scripted(known), TREE), request)
        assert answer.tokens == expected
