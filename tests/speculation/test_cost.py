"""Predictions against what they predict: drafts that are thrown as dice, machines whose costs are known."""

import random
from dataclasses import replace

import pytest

from eyas.core import DraftShape
from eyas.speculation.cost import AcceptanceRates, CostModel, best, expected_tokens, grid


def chain(steps):
    return DraftShape(steps, 1, steps + 1)


def thrown(shape, rates, rounds, seed=1):
    """Tokens per step when the target's token is a rank drawn at each position, and the drafter grows its tree."""
    # The tree does not depend on the throw: with the average chances every context looks alike.
    frontier, nodes = [((), 1.0)], []
    for depth in range(shape.num_steps):
        level = []
        for path, chance in frontier:
            row = rates.by_rank[min(depth, len(rates.by_rank) - 1)]
            level += [((*path, rank), chance * rate) for rank, rate in enumerate(row[: shape.eagle_topk])]
        level.sort(key=lambda node: -node[1])
        nodes += level
        frontier = level[: shape.eagle_topk]
    nodes.sort(key=lambda node: -node[1])
    kept = {path for path, _ in nodes[: shape.num_draft_tokens - 1]}
    dice, tokens = random.Random(seed), 0
    for _ in range(rounds):
        path = ()
        while True:
            tokens += 1
            row = rates.by_rank[min(len(path), len(rates.by_rank) - 1)]
            rank = dice.choices(range(len(row) + 1), [*row, 1 - sum(row)])[0]
            path = (*path, rank)
            if path not in kept:
                break
    return tokens / rounds


RATES = AcceptanceRates(((0.6, 0.2, 0.1), (0.5, 0.3), (0.7,)))


@pytest.mark.parametrize(
    "shape",
    [
        chain(1),
        chain(3),
        chain(6),
        DraftShape(1, 3, 4),
        DraftShape(3, 2, 5),
        DraftShape(4, 3, 12),
        DraftShape(4, 3, 31),
    ],
)
def test_expected_tokens_are_those_of_thrown_drafts(shape):
    assert expected_tokens(shape, RATES) == pytest.approx(thrown(shape, RATES, 40_000), abs=0.025)


def test_expected_tokens_by_hand():
    assert expected_tokens(chain(3), RATES) == pytest.approx(1 + 0.6 + 0.6 * 0.5 + 0.6 * 0.5 * 0.7)
    assert expected_tokens(chain(4), RATES) == pytest.approx(1 + 0.6 + 0.3 + 0.21 + 0.147)  # the last row goes on
    # Best first: 0.6 and its best child 0.3; then the root's second child, 0.2, before the grandchild 0.6 * 0.3 = 0.18.
    assert expected_tokens(DraftShape(2, 2, 4), RATES) == pytest.approx(1 + 0.6 + 0.3 + 0.2)
    assert expected_tokens(chain(5), AcceptanceRates(())) == 1.0
    assert expected_tokens(chain(5), AcceptanceRates(((1.0,),))) == 6.0
    assert expected_tokens(DraftShape(2, 2, 4), AcceptanceRates(((0.0, 0.0),))) == 1.0


def test_the_measured_factor_is_for_trees_only_and_never_promises_more_than_there_is():
    rates = replace(RATES, tree=0.5)
    assert expected_tokens(chain(3), rates) == expected_tokens(chain(3), RATES)
    assert expected_tokens(DraftShape(2, 2, 4), rates) == pytest.approx(1 + 1.1 / 2)
    assert expected_tokens(DraftShape(2, 2, 4), replace(RATES, tree=50.0)) == 3.0


def test_ranks_share_what_the_first_one_missed():
    row = AcceptanceRates.from_first([0.6], width=3).by_rank[0]
    assert row == pytest.approx((0.6, 0.4 * 0.3, 0.28 * 0.3))
    for first in (0.0, 0.3, 1.0):
        assert sum(AcceptanceRates.from_first([first], width=64).by_rank[0]) <= 1


@pytest.mark.parametrize("rows", [((0.7, 0.4),), ((-0.1,),), ((1.1,),), ((float("nan"),),)])
def test_chances_that_are_none_are_refused(rows):
    with pytest.raises(ValueError, match="must be in"):
        AcceptanceRates(rows)
    with pytest.raises(ValueError, match="tree"):
        AcceptanceRates((), tree=float("nan"))


def forward(B, T, S):
    return 0.016 + 0.0004 * B * T + 2e-8 * B * S


def propose(B, T, S):
    return T * (0.002 + 0.00003 * B)


def measured(places, kind="forward", truth=forward, rounds=5, noise=0.0, seed=0):
    model, dice = CostModel(), random.Random(seed)
    for _ in range(rounds):
        for place in places:
            model.record(kind, *place, truth(*place) * (1 + dice.uniform(-noise, noise)))
    return model


def test_what_was_never_measured_is_unknown():
    model = CostModel()
    assert model.seconds("forward", 1, 1, 64) is None and model.step(None, 1, 64) is None
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        model.record("forward", 1, 1, 64, seconds)
    assert model.seconds("forward", 1, 1, 64) is None and not model.knows("forward")
    model.record("forward", 1, 1, 64, 0.02)
    assert model.step(None, 1, 64) == pytest.approx(0.02) and model.step(chain(2), 1, 64) is None
    model.record("propose", 1, 2, 64, 0.004)
    model.record("rest", 1, 3, 0, 0.001)
    assert model.step(chain(2), 1, 64) == pytest.approx(0.025)


def test_predictions_between_and_beyond_measured_places():
    places = [(B, T, S) for B in (1, 4, 16) for T in (1, 4) for S in (256, 2048)]
    model = measured(places, noise=0.05, rounds=15)
    for place in [*places, (8, 1, 256), (8, 2, 1024), (32, 1, 256), (32, 6, 4096), (1, 6, 512)]:
        assert model.seconds("forward", *place) == pytest.approx(forward(*place), rel=0.06), place
    model = measured([(1, 3, 256), (16, 1, 256), (4, 2, 256)], "propose", propose)
    for place in [(1, 5, 256), (8, 3, 256), (32, 1, 256)]:
        assert model.seconds("propose", *place) == pytest.approx(propose(*place), rel=0.06), place


def test_predictions_never_fall_with_size():
    model = measured([(1, 1, 256), (1, 4, 256), (16, 1, 1024)], noise=0.1, rounds=9)
    for axis in range(3):
        grid = [[n if i == axis else start for i, start in enumerate((2, 2, 128))] for n in (2, 8, 32, 128)]
        seconds = [model.seconds("forward", *place) for place in grid]
        assert seconds == sorted(seconds)


def test_one_measurement_of_a_draft_tells_of_longer_ones_and_one_pass_of_more_tokens():
    assert measured([(1, 2, 64)], "propose", propose).seconds("propose", 1, 4, 64) == pytest.approx(2 * 0.00406)
    assert measured([(1, 1, 64)]).seconds("forward", 1, 4, 64) == pytest.approx(forward(1, 1, 64))


def test_steps_of_the_cost_survive_where_they_were_measured():
    """A kernel may take 8 tokens at the price of 1 and then jump: measured places are believed over any fit."""
    truth = {1: 0.016, 2: 0.016, 4: 0.016, 8: 0.016, 9: 0.03, 16: 0.03}
    model = measured([(1, T, 64) for T in truth], truth=lambda B, T, S: truth[T])
    for T, seconds in truth.items():
        assert model.seconds("forward", 1, T, 64) == pytest.approx(seconds)
    assert model.seconds("forward", 1, 6, 64) == pytest.approx(0.016, rel=0.15)


def test_compiling_and_hiccups_do_not_count():
    model = CostModel()
    for B in (1, 4):  # everywhere the first two passes compile something
        for T in (1, 4):
            for factor in (100, 30, 1, 1, 1.02, 0.99, 1, 5):
                model.record("forward", B, T, 64, forward(B, T, 64) * factor)
    for B, T in [(1, 1), (4, 4), (2, 2)]:
        assert model.seconds("forward", B, T, 64) == pytest.approx(forward(B, T, 64), rel=0.12)
    model.record("forward", 2, 4, 64, 100 * forward(2, 4, 64))  # a new place is held against its neighbours
    assert model.seconds("forward", 2, 4, 64) < 1.7 * forward(2, 4, 64)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_machine_that_changes_is_followed_where_it_is_not_measured_too(factor):
    model = measured([(1, 1, 64), (1, 4, 64)], rounds=12)
    model.record("propose", 1, 3, 64, propose(1, 3, 64))
    for _ in range(40):
        model.record("forward", 1, 4, 64, factor * forward(1, 4, 64))
    for place in [(1, 1, 64), (1, 4, 64), (4, 2, 64)]:
        assert model.seconds("forward", *place) == pytest.approx(factor * forward(*place), rel=0.08), place
    assert model.seconds("propose", 1, 3, 64) == pytest.approx(factor * propose(1, 3, 64), rel=0.08)


def test_a_place_that_alone_changed_is_believed_after_three_passes():
    model = measured([(1, 1, 64), (1, 4, 64)], rounds=12)
    for _ in range(300):
        model.record("forward", 1, 4, 64, forward(1, 4, 64))
    for _ in range(3):  # compiled in the meantime
        model.record("forward", 1, 1, 64, 0.6 * forward(1, 1, 64))
    assert model.seconds("forward", 1, 1, 64) == pytest.approx(0.6 * forward(1, 1, 64), rel=0.01)
    assert model.seconds("forward", 1, 4, 64) == pytest.approx(forward(1, 4, 64), rel=0.01)


def test_noise_does_not_carry_predictions_away():
    model, dice = measured([(1, 1, 64), (1, 4, 64)], rounds=12), random.Random(3)
    for _ in range(3000):
        slow = 20 if dice.random() < 0.01 else 1
        model.record("forward", 1, 4, 64, forward(1, 4, 64) * dice.lognormvariate(0, 0.1) * slow)
    assert model.seconds("forward", 1, 1, 64) == pytest.approx(forward(1, 1, 64), rel=0.2)


def test_best_is_the_fastest_for_the_whole_batch():
    model = measured([(B, T, 64) for B in (1, 32) for T in (1, 2, 4)])
    for B in (1, 32):
        for T in (1, 3):
            model.record("propose", B, T, 64, propose(B, T, 64))
    rates = AcceptanceRates(((0.8,), (0.7,), (0.6,)))
    found = best([chain(1), chain(3)], model, rates, sequences=1, length=64)
    assert [estimate.shape for estimate in found] == [chain(3), chain(1), None]
    seconds = forward(1, 4, 64) + propose(1, 3, 64)
    assert found[0].tokens == pytest.approx(1 + 0.8 + 0.56 + 0.336) and found[0].seconds == pytest.approx(seconds)
    assert found[0].speed == pytest.approx(found[0].tokens / seconds)
    # Three sequences in a bucket of 32, one of them drafted for: all 32 are paid for.
    found = best([chain(1)], model, rates, sequences=3, drafted=1, bucket=32, length=64)
    speeds = {estimate.shape: estimate.speed for estimate in found}
    assert speeds[None] == pytest.approx(3 / forward(32, 1, 64))
    assert speeds[chain(1)] == pytest.approx(3.8 / (forward(32, 2, 64) + propose(32, 1, 64)))
    assert found[0].shape is None


def test_best_puts_the_unknown_last_and_never_prices_plain_above_a_draft():
    model = measured([(1, 1, 64)])
    found = best([chain(2)], model, RATES, sequences=1, length=64)
    assert [(e.shape, e.seconds is None, e.speed > 0) for e in found] == [(None, False, True), (chain(2), True, False)]
    for _ in range(5):
        model.record("forward", 1, 3, 64, 0.01)  # cheaper than one token: plain decoding was disturbed
        model.record("propose", 1, 2, 64, 0.001)
    found = best([chain(2)], model, AcceptanceRates(((0.0,),)), sequences=1, length=64)
    assert found[0].shape is None and found[0].seconds == pytest.approx(0.01)


def test_the_grid():
    shapes = grid((1, 3), (1, 2, 4), (4, 8, 64))
    assert shapes == [
        chain(1),
        chain(3),
        DraftShape(3, 2, 4),
        DraftShape(3, 2, 8),
        DraftShape(1, 4, 4),
        DraftShape(3, 4, 4),
        DraftShape(3, 4, 8),
    ]
    assert len(set(grid())) == len(grid()) > 40
