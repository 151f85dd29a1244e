"""Acceptance from a recording: worked out by hand, and against real runs where only the true branch is known."""

from __future__ import annotations

import numpy as np
import pytest
from engine.harness import target_of
from training.taught import NAME, PROMPTS, taught

from eyas.core import DraftShape, SamplingParams, UsageError
from eyas.speculation.cost import AcceptanceRates, expected_tokens
from eyas.training.acceptance import answer_all, total
from eyas.training.recording import BEHIND, UNRANKED, Recording, record
from eyas.training.simulate import rates, simulate, tree_hits, walk

N = UNRANKED
E = BEHIND


def recording(ranks: list[list[int]], probs: list[float] = (0.5, 0.25, 0.125)) -> Recording:  # type: ignore[assignment]
    array = np.array(ranks)
    logps = np.log(np.broadcast_to(np.array(probs, dtype=np.float32), (*array.shape, len(probs))))
    return Recording(array, np.ascontiguousarray(logps))


def chain(steps: int) -> DraftShape:
    return DraftShape(steps, 1, steps + 1)


# By hand


def test_a_chain_by_hand():
    """Outputs 1 .. 6 behind output 0: two right, a miss; one right and the bonus; the end is no miss."""
    told = recording([[0, 0, N], [N, N, N], [N, N, N], [0, 1, N], [N, N, E], [0, E, E]])
    (found,) = simulate([told], [chain(3)])
    # from 0: hits 0, 0, then a bonus: at 3. From 3: one hit and the bonus: at 5. From 5: one hit, and the answer ends.
    assert (found.stats.steps, found.stats.emitted) == (3, 6)
    assert found.stats.accepted == [3, 1, 0] and found.stats.reached == [3, 2, 1]
    assert found.acceptance_length == 2.0
    # one of two drafts that were right once and could go on was right twice, and that one no third time
    assert found.rates == AcceptanceRates(((1.0,), (0.5,), (0.0,)))
    assert found.expected_tokens == 1 + 1 + 0.5


def test_answers_are_decoded_one_by_one():
    one, two = recording([[0], [0], [0]]), recording([[N], [0]])
    (found,) = simulate([one, two], [chain(1)])
    # 2 + 1 tokens of the first, 1 + 1 of the second
    assert found.stats.steps == 4 and found.stats.emitted == 5


def test_visited_places():
    stats, visited = walk(np.array([2, 0, 0, 0, 1, 0]), [4, 2], chain(2))
    assert visited.tolist() == [0, 3, 4] and stats.steps == 3 and stats.emitted == 6


def test_a_tree_by_hand():
    """Top-k 2 with probabilities 1/2 and 1/4: which nodes there are follows from their products."""
    ranks = np.array([[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [N, 0]])
    logps = recording(ranks.tolist()).logps

    def hits(tokens: int) -> list[int]:
        return tree_hits(ranks, logps, DraftShape(2, 2, tokens)).tolist()

    # nodes by probability: 0 (1/2), then 00 and 1 (1/4 each, the older first), then 01 and 10 (1/8), then 11 (1/16)
    assert hits(7) == [2, 2, 2, 2, 0, 0]
    assert hits(6) == [2, 2, 2, 1, 0, 0]
    assert hits(4) == [2, 1, 1, 1, 0, 0]
    assert hits(3) == [1, 1, 1, 1, 0, 0]


def test_a_tree_follows_each_place():
    """A drafter that is sure goes deep, one that is not goes wide, with as many tokens."""
    ranks = np.array([[0, 0, 0], [1, 0, 0], [0, 0, 0], [1, 0, 0]])
    sure, unsure = ([0.98, 0.01], [0.5, 0.49])
    logps = np.log(np.array([[row] * 3 for row in (sure, sure, unsure, unsure)], dtype=np.float32))
    assert tree_hits(ranks, logps, DraftShape(3, 2, 4)).tolist() == [3, 0, 2, 1]


def test_rates_leave_out_what_lies_behind_the_end():
    shape = DraftShape(2, 2, 4)
    ranks = np.array([[0, 0], [1, N], [0, E], [N, N]])
    found = rates(ranks, np.array([2, 1, 1, 0]), shape)
    assert found.by_rank == ((0.5, 0.25), (0.5, 0.0))
    modelled = expected_tokens(shape, AcceptanceRates(found.by_rank)) - 1
    assert found.tree == pytest.approx((2 + 1 + 0) / 3 / modelled)


def test_nothing_right_and_nothing_there():
    (found,) = simulate([recording([[N, N], [N, E]])], [DraftShape(2, 2, 4)])
    assert found.acceptance_length == found.expected_tokens == 1.0
    (none,) = simulate([Recording(np.zeros((0, 2), dtype=np.int64), np.zeros((0, 2, 3), dtype=np.float32))], [chain(2)])
    assert none.stats.steps == 0 and none.acceptance_length == none.expected_tokens == 1.0


def test_shapes_beyond_the_recording_are_refused():
    for shape in (chain(4), DraftShape(2, 4, 8)):
        with pytest.raises(UsageError, match="3 steps and top-k 3, which is not enough"):
            simulate([recording([[0, 0, 0]])], [shape])


# Against real runs


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_trees_come_out_nearly_as_they_are(temperature):
    sampling = SamplingParams(max_tokens=64, seed=0, temperature=temperature)

    def real(shape: DraftShape):
        return answer_all(target_of(NAME), taught(), PROMPTS, shape=shape, sampling=sampling)

    recorded = record(target_of(NAME), taught(), real(chain(5)))
    shapes = [DraftShape(3, 2, 8), DraftShape(5, 4, 16), DraftShape(4, 8, 32)]
    for found in simulate(recorded, shapes):
        truly = total(a.stats for a in real(found.shape))
        assert truly.acceptance_length > 1.1
        assert found.acceptance_length == pytest.approx(truly.acceptance_length, rel=0.04)
        assert found.expected_tokens == pytest.approx(found.acceptance_length, rel=0.04)
