"""The whole loop, draft -> choose -> accept, over toy targets: plain decoding's text, from the exact distribution."""

import importlib
from pathlib import Path

import pytest
import torch
from speculation.toys import (
    DRAFTER,
    FITS,
    MISSES,
    REDUCED,
    SETTINGS,
    TARGET,
    VOCAB,
    fit,
    joint,
    joint_counts,
    markov,
    mutant,
    plain,
    sampling,
    speculate,
)

from eyas.core import DraftShape, SamplingParams
from eyas.speculation import noise
from eyas.speculation import sampling as sampling_module

SHAPES = {"chain": DraftShape(3, 1, 4), "tree": DraftShape(2, 3, 8)}
SEEDS = 240
TEXT = 7  # tokens compared for equality; the distribution is that of the first two


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SETTINGS)
def test_speculation_changes_nothing_and_follows_the_target(name, shape):
    # Two tokens for most seeds, a longer text for some: every roll-back and every budget of steps.
    pairs = []
    for length, token_ids in ((2, None), (2, REDUCED), (TEXT, None), (TEXT, REDUCED)):
        seeds = [
            s for s in range(SEEDS) if (s % 10 == 0) == (length == TEXT) and (s % 3 == 0) == (token_ids is REDUCED)
        ]
        batch = [sampling(name, seed) for seed in seeds]
        texts, _ = speculate(TARGET, DRAFTER, batch, SHAPES[shape], length, token_ids)
        assert texts == [plain(TARGET, params, length) for params in batch]
        pairs += [text[:2] for text in texts]
    assert len(pairs) == SEEDS
    assert fit(joint_counts(pairs), joint(TARGET, sampling(name))) > FITS


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drafter", ["same", "opposite", "unrelated"])
def test_any_drafter_gives_the_same_text(shape, drafter):
    table = {"same": TARGET, "opposite": -TARGET, "unrelated": markov(8)}[drafter]
    for name in ("plain", "all"):
        batch = [sampling(name, seed) for seed in (0, 1, -1, 2**64 - 2, 10**40)]
        texts, emitted = speculate(TARGET, table, batch, SHAPES[shape], 20)
        assert texts == [plain(TARGET, params, 20) for params in batch]
        if drafter == "same" and shape == "chain":  # the target as its own drafter is never wrong
            assert set(emitted) == {SHAPES[shape].num_steps + 1}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_of_all_settings_gives_each_its_own_text(shape):
    batch = [sampling(name, seed) for name in SETTINGS for seed in (3, 4)] + [SamplingParams()] * 2
    texts, _ = speculate(TARGET, DRAFTER, batch, SHAPES[shape], 20)
    assert texts == [plain(TARGET, params, 20) for params in batch]
    assert len(set(map(tuple, texts))) > len(batch) / 2


def test_greedy_is_the_same_with_penalties_on_the_path():
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.8, presence_penalty=0.4, min_tokens=4)
    text = plain(TARGET, params, 40)
    assert len(set(text)) > 3
    for shape in SHAPES.values():
        for drafter in (TARGET, DRAFTER, markov(8)):
            assert speculate(TARGET, drafter, [params], shape, 40)[0] == [text]


def test_the_test_sees_penalties_without_the_path():
    params = sampling("repetition", 3)
    text = plain(TARGET, params, 40)
    assert speculate(TARGET, DRAFTER, [params], SHAPES["tree"], 40)[0] == [text]
    assert speculate(TARGET, DRAFTER, [params], SHAPES["tree"], 40, per_path=False)[0] != [text]


def test_the_test_sees_noise_reused_across_output_indices(monkeypatch):
    """Texts still agree and each token's own distribution is right: only the joint distribution tells."""
    reused = mutant(noise.gumbel, "indices.to(token_ids.device)", "indices.to(token_ids.device).mul(0)")
    monkeypatch.setattr(sampling_module, "gumbel", reused)
    table = TARGET[:1].expand(VOCAB, -1).contiguous()
    batch = [sampling("plain", seed) for seed in range(SEEDS)]
    pairs, _ = speculate(table, table, batch, SHAPES["chain"], 2)
    first = [sum(a == token for a, _ in pairs) for token in range(VOCAB)]
    assert fit(first, table[0].softmax(-1).tolist()) > FITS
    assert fit(joint_counts(pairs), joint(table, sampling("plain"))) < MISSES


def test_the_test_sees_noise_shared_by_the_sequences_of_a_batch(monkeypatch):
    """Each sequence's distribution is right: only together they are not."""
    shared = mutant(noise.gumbel, "_signed(_GOLDEN) + bases", "_signed(_GOLDEN) + bases[:1]")
    monkeypatch.setattr(sampling_module, "gumbel", shared)
    pairs, _ = speculate(TARGET, DRAFTER, [sampling("plain", seed) for seed in range(SEEDS)], SHAPES["chain"], 2)
    assert fit(joint_counts(pairs), joint(TARGET, sampling("plain"))) < MISSES


def test_the_test_sees_noise_shared_by_all_tokens(monkeypatch):
    flat = mutant(noise.gumbel, "+ token_ids * _signed", "+ 0 * token_ids * _signed")
    monkeypatch.setattr(sampling_module, "gumbel", flat)
    pairs = [plain(TARGET, sampling("plain", seed), 2) for seed in range(SEEDS)]
    assert fit(joint_counts(pairs), joint(TARGET, sampling("plain"))) < MISSES


def test_coupling_against_the_other_rules(monkeypatch):
    """benchmarks/coupling.py prints the table; these orderings hold with a wide margin."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    coupling = importlib.import_module("coupling")
    one, four = (coupling.measure(1.0, 0.5, k, contexts=8, samples=80) for k in (1, 4))
    # With one child no rule beats the overlap, which the p/q rule attains; coupling is bounded below (Daliri et al.).
    assert one.overlap / (2 - one.overlap) - 0.04 < one.coupled < one.overlap + 0.04
    assert abs(one.rejection - one.overlap) < 0.05
    assert one.coupled > one.top_k + 0.1
    # With siblings coupling is ahead of both.
    assert four.coupled > four.rejection > four.top_k + 0.1


def test_greedy_coupling_is_plain_agreement():
    logits = torch.randn(4, 9)
    scores = sampling_module.perturbed(logits, SamplingParams(), range(4))
    assert torch.equal(scores, logits)
