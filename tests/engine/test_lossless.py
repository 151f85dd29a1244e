"""Telling near-ties from bugs: rounding is excused as far as it can reach, and nothing else is."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from engine.harness import CHAIN, TREE, lively, plant, truth, words

from eyas.core import Acceptance, Draft, SamplingParams
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.drafter.model import untrained
from eyas.engine import engine, lossless
from eyas.engine.llm import LLM
from eyas.engine.lossless import Comparer, borders, explained, first_difference
from eyas.speculation.sampling import process_logits
from eyas.target.adapter import HFTarget

NAME = "llama"
GREEDY = SamplingParams(max_tokens=40)
SAMPLED = SamplingParams(max_tokens=40, temperature=1.0, seed=5, top_k=20, top_p=0.9, repetition_penalty=1.3)


def pair(name: str = NAME, dtype: torch.dtype = torch.float32, shape: Any = CHAIN) -> LLM:
    model = zoo.case(name).build().to(dtype)
    target = HFTarget(model)
    drafter = lively(untrained(target.hidden_size, target.num_layers, target.vocab_size, dtype=dtype))
    drafter = Eagle3Drafter(drafter)
    return LLM(target, words(), drafter=drafter, shape=shape, context_length=128, speculation="fixed")


def prompts(name: str = NAME, count: int = 4) -> list[list[int]]:
    return [zoo.case(name).prompt(30, seed) for seed in range(count)]


# Whole comparisons


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_fp32_is_equal(shape):
    comparer = Comparer(pair(shape=shape))
    for prompt, sampling in itertools.product(prompts(count=2), (GREEDY, SAMPLED)):
        found = comparer.compare(prompt, sampling, speculative_first=sampling is SAMPLED)
        assert found.equal and found.lossless and found.divergences == ()
        assert found.plain.token_ids == found.speculative.token_ids
        assert found.plain.stats.steps == 0 < found.speculative.stats.steps
        assert found.speedup > 0
    assert "_fp32" not in vars(comparer), "the copy is made when it is needed"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.thorough
def test_bf16_differs_by_near_ties_at_most(name):
    divergences = []
    for shape, sampling in (
        (CHAIN, replace(SAMPLED, temperature=2.0, top_k=0)),
        (TREE, replace(GREEDY, max_tokens=80)),
    ):
        comparer = Comparer(pair(name, torch.bfloat16, shape))
        round_less(comparer.llm.target)
        for prompt in prompts(name, 6):
            found = comparer.compare(prompt, sampling)
            assert found.lossless, found.divergences
            divergences += found.divergences
    assert divergences, "nothing was judged"
    assert all(d.error > 0 and d.near_tie for d in divergences)


def round_less(target: HFTarget) -> None:
    """Passes over several tokens keep the head's sums in fp32, as a kernel for many rows might."""

    def head(module: torch.nn.Linear, args: Any, logits: torch.Tensor) -> torch.Tensor:
        exact = torch.nn.functional.linear(args[0].float(), module.weight.float())
        return exact if logits.shape[1] > 1 else logits

    target.model.get_output_embeddings().register_forward_hook(head)


def test_bf16_with_an_image():
    seen = truth("qwen2.5-vl", image=True)
    comparer = Comparer(pair("qwen2.5-vl", torch.bfloat16))
    noisy(comparer.llm.target, 0.1)
    found = comparer.compare(seen.prompt, replace(SAMPLED, temperature=2.0), seen.images)
    assert found.divergences and found.lossless


def noisy(target: HFTarget, size: float) -> None:
    """Rounds passes over several tokens differently: by up to ``size``, another way each time."""
    forward, generator = target.forward, torch.Generator().manual_seed(0)

    def rounded(block: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(block, *args, **kwargs)
        noise = torch.rand(out.logits.shape, generator=generator) * 2 - 1
        return replace(out, logits=out.logits + size * noise) if out.logits.shape[1] > 1 else out

    target.forward = rounded  # type: ignore[method-assign]


def test_the_comparison_goes_on_behind_near_ties():
    """Each is forced to plain's token, and the next one is found too: places rise, and pairs start with plain's."""
    comparer = Comparer(pair(dtype=torch.bfloat16))
    noisy(comparer.llm.target, 0.05)
    most = 0
    for prompt, sampling in itertools.product(prompts(count=3), (GREEDY, replace(SAMPLED, temperature=2.0))):
        found = comparer.compare(prompt, sampling)
        assert found.lossless and found.equal == (not found.divergences)
        places = [d.index for d in found.divergences]
        assert places == sorted(set(places))
        assert all(found.plain.token_ids[d.index] == d.tokens[0] != d.tokens[1] for d in found.divergences)
        most = max(most, len(places))
    assert most >= 2


def test_larger_differences_are_bugs():
    comparer = Comparer(pair(dtype=torch.bfloat16))
    noisy(comparer.llm.target, 3.0)
    found = [comparer.compare(prompt, GREEDY) for prompt in prompts(count=2)]
    assert not any(one.lossless for one in found)
    assert all(not one.divergences[-1].near_tie for one in found)
    assert all(d.gap >= d.error for one in found for d in one.divergences if not d.near_tie)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_wrong_token_accepted_now_and_then_is_found(sampling, dtype, monkeypatch):
    right, calls = engine.accept, itertools.count(1)

    def wrong(draft: Draft, chosen: torch.Tensor) -> Acceptance:
        if draft.tokens.shape[1] > 1 and next(calls) % 9 == 0:
            tokens = torch.stack((draft.tokens[:, 1], chosen[:, 1]), dim=1)
            return Acceptance(torch.tensor([2]), torch.tensor([[0, 1]]), tokens)
        return right(draft, chosen)

    monkeypatch.setattr(engine, "accept", wrong)
    comparer = Comparer(pair(dtype=dtype))
    for prompt in prompts(count=2):
        found = comparer.compare(prompt, sampling)
        assert not found.equal and not found.lossless


def test_an_answer_that_ends_elsewhere_is_a_bug(monkeypatch):
    comparer, tokens = Comparer(pair()), truth(NAME).tokens
    sampling = replace(GREEDY, stop_token_ids=(tokens[9],))
    assert comparer.compare(truth(NAME).prompt, sampling).equal
    stop_ids = engine.Engine.stop_ids
    monkeypatch.setattr(engine.Engine, "stop_ids", lambda *args: (*stop_ids(*args), tokens[4]) if next(calls) else ())
    calls = itertools.count(0)  # the first answer, plain's, never stops
    found = comparer.compare(truth(NAME).prompt, GREEDY)
    assert len(found.plain.token_ids) == 40 and len(found.speculative.token_ids) == 5
    assert not found.lossless and found.divergences[0].tokens == (tokens[5], -1)


@pytest.mark.parametrize(
    ("a", "b", "place"),
    [([], [], None), ([1], [1], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2], [1], 1), ([], [4], 0)],
)
def test_first_difference(a, b, place):
    assert first_difference(a, b) == place


# Judgement, against every way of rounding there is

VOCAB = 6
CUTS = {
    "greedy": {"temperature": 0.0, "top_k": 2, "top_p": 0.5, "min_p": 0.5},  # greedy ignores them
    "no cut": {},
    "top-k": {"top_k": 3},
    "top-1": {"top_k": 1},
    "top-p": {"top_p": 0.7},
    "narrow top-p": {"top_p": 0.05},
    "min-p": {"min_p": 0.2},
    "min-p 1": {"min_p": 1.0},
    "top-k and top-p": {"top_k": 4, "top_p": 0.8},
    "min-p and top-p": {"min_p": 0.15, "top_p": 0.8},
    "all": {"top_k": 4, "top_p": 0.85, "min_p": 0.1},
}
EXACT = {"greedy", "no cut", "top-k", "top-1", "min-p", "min-p 1"}  # with top-p, what is said is a bound
CORNERS = torch.tensor(list(itertools.product((-1.0, 0.0, 1.0), repeat=VOCAB)))  # each weight up, as it is, or down


def cases(cut: str, count: int = 90) -> Any:
    """(settings, log-weights, noise, error) at random: near borders and far from them."""
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(**{"temperature": 1.0, **CUTS[cut]})
    for number in range(count):
        weights = 1.2 * torch.randn(VOCAB, generator=generator)
        noise = torch.zeros(VOCAB) if params.greedy else -torch.rand(VOCAB, generator=generator).log().neg().log()
        yield params, weights, noise, (0.02, 0.1, 0.3)[number % 3]


def kept_everywhere(params: SamplingParams, weights: torch.Tensor, error: float) -> torch.Tensor:
    """bool [corners, V]: what is left after every way of being wrong by ``error`` at most."""
    return process_logits(weights + error * CORNERS, params, output_indices=[0] * len(CORNERS)) > -math.inf


@pytest.mark.parametrize("cut", CUTS)
def test_borders_are_where_rounding_can_move_them(cut):
    undecided = 0
    for params, weights, _, error in cases(cut):
        kept = kept_everywhere(params, weights, error)
        surely, possibly = borders(weights, params, error)
        assert not (surely & ~kept.all(0)).any(), "surely, but not under some error"
        assert not (kept.any(0) & ~possibly).any(), "under some error, but not possibly"
        if cut in EXACT:
            assert torch.equal(surely, kept.all(0)) and torch.equal(possibly, kept.any(0))
        undecided += int((possibly & ~surely).sum())
    assert (undecided > 0) == (cut not in ("greedy", "no cut"))


@pytest.mark.parametrize("cut", CUTS)
def test_what_rounding_can_choose_is_explained(cut):
    """Never a false alarm; and without cuts, never an excuse either."""
    pairs = excused = 0
    for params, weights, noise, error in cases(cut):
        shifted = weights + error * CORNERS
        chosen = process_logits(shifted, params, output_indices=[0] * len(CORNERS)) + noise
        reachable = set(chosen.argmax(-1).tolist())
        for a, b in itertools.combinations(range(VOCAB), 2):
            told = explained(weights, weights + noise, (a, b), params, error)
            possible = {a, b} <= reachable
            assert told or not possible
            assert told == explained(weights, weights + noise, (b, a), params, error)
            if cut in ("greedy", "no cut"):
                assert told == possible
            pairs, excused = pairs + possible, excused + (told and not possible)
    assert pairs > 10
    assert excused <= pairs


def test_what_no_rounding_explains():
    weights = torch.tensor([3.0, 2.9, 0.0, -1.0])
    none = SamplingParams()
    assert explained(weights, weights, (0, 1), none, 0.06)
    assert not explained(weights, weights, (0, 1), none, 0.04)
    assert not explained(weights, weights, (0, 2), none, 0.06)
    assert not explained(weights, weights, (1, 2), none, 0.06)
    assert not explained(weights, weights, (0, -1), none, 10.0)
    second = SamplingParams(temperature=1.0, top_k=1)
    noise = torch.tensor([0.0, 5.0, 9.0, 0.0])  # the noise wants others, top-k has only the first
    assert explained(weights, weights + noise, (0, 1), second, 0.06)
    assert not explained(weights, weights + noise, (0, 2), second, 0.06)


BUGS = {
    "top-k": ("before - itself < sampling.top_k", "before < sampling.top_k"),
    "top-k and top-p": ("left = sums[int(kept.sum())]", "left = sums[-1]"),
    "top-p": ("math.exp(shift)", "1.0"),
    "min-p": ("math.log(sampling.min_p) + shift", "math.log(sampling.min_p)"),
    "all": ("shift = sign * 2 * error", "shift = sign * error"),
}


@pytest.mark.parametrize("cut", BUGS)
def test_these_tests_see(cut, monkeypatch):
    plant(monkeypatch, lossless, "borders", *BUGS[cut])
    monkeypatch.setitem(globals(), "borders", lossless.borders)
    with pytest.raises(AssertionError):
        test_borders_are_where_rounding_can_move_them(cut)
