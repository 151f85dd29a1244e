"""A recording must say of every place what a draft there really holds: the engine's own runs are what it is held to."""

from __future__ import annotations

import numpy as np
import pytest
from engine.harness import target_of, truth
from training.taught import NAME, PROMPTS, answered, taught

from eyas.core import DraftShape, SamplingParams, UsageError
from eyas.training import recording
from eyas.training.acceptance import answer_all, total
from eyas.training.recording import BEHIND, UNRANKED, record
from eyas.training.simulate import simulate

SETTINGS = {
    "greedy": {},
    "sampled": {"temperature": 0.7},
    "cut": {"temperature": 0.8, "top_p": 0.7, "top_k": 30},
}
EXACT = [DraftShape(n, 1, n + 1) for n in (1, 2, 5, 8)] + [DraftShape(1, 3, 4), DraftShape(1, 8, 9)]


def real(drafter, shape: DraftShape, **sampling):
    settings = SamplingParams(**{"max_tokens": 48, "seed": 0, **sampling})
    return answer_all(target_of(NAME), drafter, PROMPTS, shape=shape, sampling=settings)


@pytest.mark.parametrize(
    ("kind", "how"),
    [*(("standard", how) for how in SETTINGS), ("reduced vocabulary", "greedy"), ("two layers, all norms", "greedy")],
)
def test_chains_and_single_levels_come_out_as_the_engine_counts_them(kind, how):
    drafter, settings = taught(kind), SETTINGS[how]
    recorded = record(target_of(NAME), drafter, real(drafter, EXACT[0], **settings))
    for simulated in simulate(recorded, EXACT):
        assert simulated.stats == total(a.stats for a in real(drafter, simulated.shape, **settings)), simulated.shape
    assert simulate(recorded, EXACT)[2].stats.accepted[1] > 0, "nothing was right at depth: nothing was compared"


def test_neither_pieces_nor_order_matter(monkeypatch):
    drafter = taught()
    answers = real(drafter, EXACT[0])
    whole = record(target_of(NAME), drafter, answers)
    monkeypatch.setattr(recording, "CHUNK", 7)
    pieces = record(target_of(NAME), drafter, answers[::-1])[::-1]
    for one, other in zip(whole, pieces, strict=True):
        np.testing.assert_array_equal(one.ranks, other.ranks)
        np.testing.assert_allclose(one.logps, other.logps, atol=1e-4)


def test_what_is_recorded():
    drafter = taught("reduced vocabulary")
    told = truth(NAME, length=12)
    reports: list[float] = []
    (found,) = record(
        target_of(NAME), drafter, [answered(told.prompt, told.tokens)], depth=4, width=6, report=reports.append
    )
    assert found.ranks.shape == (63, 4) and found.logps.shape == (63, 4, 6) and reports == [1.0]
    known = np.arange(63)[:, None] + np.arange(4) < 63
    assert ((found.ranks == BEHIND) == ~known).all()
    assert (np.diff(found.logps, axis=-1)[known] <= 0).all() and (np.exp(found.logps[known]).sum(-1) <= 1 + 1e-5).all()
    vocabulary = set(drafter.model.draft_to_target.tolist())
    foreign = np.array([token not in vocabulary for token in told.tokens[1:]])
    assert foreign.any() and (found.ranks[foreign, 0] == UNRANKED).all() and (found.ranks[~foreign, 0] >= 0).any()


def test_answers_of_a_token_or_two():
    drafter = taught()
    answers = [answered([5], [7]), answered([5], [7, 9]), answered([5, 6], [7, 9, 11])]
    assert [len(r.ranks) for r in record(target_of(NAME), drafter, answers)] == [0, 1, 2]


def test_penalties_are_refused():
    answers = [answered([5, 6], [7, 8])]
    answers[0].sampling.__dict__["repetition_penalty"] = 1.2
    with pytest.raises(UsageError, match="Penalties cannot be simulated"):
        record(target_of(NAME), taught(), answers)
