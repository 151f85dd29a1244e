"""Intervals on timings whose truth is known: coverage, an A/A comparison, drift, requests that depend on each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import t

from eyas.bench.passes import Level
from eyas.bench.statistics import crossing, curve, speedup, spread
from eyas.bench.verdict import Found, judge

LEVELS = tuple(Level("concurrency", 2**n) for n in range(7))


def passes(random: np.random.Generator, rounds: int, effect: float, *, drift: float = 0.0, noise: float = 0.03):
    """Speeds of both sides by round, (with, without), as a slow machine makes them.

    A round has its own pace (a neighbour, a clock), from which both sides depart a little; within a pass, requests wait
    for one another, so that its speed is one number and not the mean of many. ``drift``: how much slower each pass is
    than the one before; the sides take turns in being first.
    """
    pace = np.exp(random.normal(0, 0.2, rounds))
    sides = {}
    for side, gain in (("without", 1.0), ("with", effect)):
        first = (np.arange(rounds) % 2 == 0) == (side == "without")
        slot = 2 * np.arange(rounds) + ~first
        sides[side] = 100 * gain * pace * np.exp(random.normal(0, noise, rounds) - drift * slot)
    return sides["with"], sides["without"]


@pytest.mark.parametrize("rounds", [6, 10])
@pytest.mark.parametrize("effect", [1.0, 1.4])
def test_the_interval_covers_the_truth_95_times_of_100(rounds, effect):
    random = np.random.default_rng(rounds)
    found = [speedup(*passes(random, rounds, effect)) for _ in range(400)]
    covered = np.mean([one.low <= effect <= one.high for one in found])
    assert 0.928 <= covered <= 0.985  # of 400: two standard errors are 0.022
    assert all(one.low < one.middle < one.high for one in found)


def test_drift_does_not_fool_it():
    """Every pass is 1% slower than the one before, which is a factor of 1.5 over 20 rounds; the noise is 3%."""
    random = np.random.default_rng(1)
    found = [speedup(*passes(random, 20, 1.1, drift=0.01)) for _ in range(400)]
    assert np.mean([one.low <= 1.1 <= one.high for one in found]) >= 0.94
    assert np.mean([one.middle for one in found]) == pytest.approx(1.1, rel=0.003)


def blocks(random: np.random.Generator, count: int, *, anew: bool, launch: float = 0.05):
    """Log speeds of blocks, each a launch of both sides. Not ``anew``: who ends a block begins the next without one."""
    sides = {name: random.normal(0, launch, count) for name in ("with", "without")}
    if not anew:
        for n in range(1, count):
            kept = "with" if n % 2 else "without"
            sides[kept][n] = sides[kept][n - 1]
    return tuple(np.exp(math.log(effect) + sides[name]) for name, effect in (("with", 1.1), ("without", 1.0)))


def test_blocks_are_launches_of_their_own():
    """What differs from launch to launch is in the interval only where no launch serves two blocks."""
    random = np.random.default_rng(3)
    covered = {
        anew: np.mean(
            [one.low <= 1.1 <= one.high for one in (speedup(*blocks(random, 6, anew=anew)) for _ in range(400))]
        )
        for anew in (True, False)
    }
    assert covered[True] >= 0.928 and covered[False] < 0.9


def test_with_drift_whoever_is_always_first_would_win():
    """The same without taking turns, to see that the test above tests something."""
    steps = np.exp(-0.02 * np.arange(20))
    always_second = speedup(100 * steps[1::2], 100 * steps[::2])
    assert always_second.high < 1
    in_turn = speedup(
        100 * steps[[1, 2, 5, 6, 9, 10, 13, 14, 17, 18]], 100 * steps[[0, 3, 4, 7, 8, 11, 12, 15, 16, 19]]
    )
    assert in_turn.low < 1 < in_turn.high and in_turn.middle == pytest.approx(1, abs=1e-9)


def test_a_round_is_one_observation_however_many_requests_it_has():
    """Requests of a pass share its luck: taken as independent, an A/A comparison would find differences."""
    random = np.random.default_rng(2)
    wrong_by_round = wrong_by_request = 0
    for _ in range(15):
        luck = random.normal(0, 0.1, (2, 10, 1))
        requests = 100 * np.exp(luck + random.normal(0, 0.02, (2, 10, 32)))
        whole = requests.mean(axis=2)
        by_round = speedup(whole[0], whole[1])
        by_request = speedup(requests[0].ravel(), requests[1].ravel())
        wrong_by_round += not by_round.low <= 1 <= by_round.high
        wrong_by_request += not by_request.low <= 1 <= by_request.high
    assert wrong_by_round <= 2 and wrong_by_request >= 8


def test_the_same_side_twice_is_not_shown_at_seven_levels_at_once():
    """An A/A comparison over the whole sweep: 95 of 100 must show nothing at any level."""
    random, shown = np.random.default_rng(3), 0
    for _ in range(80):
        found = []
        for level in LEVELS:
            speeds = passes(random, 10, 1.0)
            found.append(Found(level, speedup(*speeds), speedup(*speeds, confidence=1 - 0.05 / 7), 10))
        shown += judge(found).outcome != "not shown"
    assert shown <= 0.05 * 80 + 2 * math.sqrt(80 * 0.05 * 0.95)  # two standard errors


def test_of_ratios_that_are_normal_the_interval_is_nearly_students():
    logs = np.random.default_rng(4).normal(0.3, 0.05, 12)
    found = speedup(np.exp(logs), np.ones(12))
    half = t.ppf(0.975, 11) * logs.std(ddof=1) / math.sqrt(12)
    assert found.middle == pytest.approx(math.exp(logs.mean()))
    assert logs.mean() - 1.2 * half < math.log(found.low) <= logs.mean() - half + 1e-9
    assert logs.mean() + 1.2 * half > math.log(found.high) >= logs.mean() + half - 1e-9
    assert speedup(np.exp(logs), np.ones(12)) == found, "the resamples are the same each time"


def test_one_round_says_nothing_about_its_certainty():
    found = speedup([2.0], [1.0])
    assert found.middle == pytest.approx(2) and (found.low, found.high) == (0.0, math.inf)


def test_percentiles():
    values = list(range(1, 102))
    assert spread(values) == {"mean": 51, "p50": 51, "p90": 91, "p99": 100}
    assert spread([]) is None
    assert curve(values, points=5) == [1, 26, 51, 76, 101] and curve([]) == []


def test_break_even_is_between_the_last_gain_and_the_first_loss():
    assert crossing([1, 4, 16], [2.0, 1.25, 0.8]) == pytest.approx(8.0)  # 1.25 and 0.8: as far from 1 in logarithms
    assert crossing([1, 4, 16], [2.0, 1.5, 1.2]) is None and crossing([1, 4], [0.9, 0.8]) is None
    assert crossing([1, 2, 4, 8], [1.2, 0.9, 1.1, 0.9]) > 4
    assert crossing([1, 4], [1.5, 0.9], even=1.2) == pytest.approx(4 ** (math.log(1.25) / math.log(1.5 / 0.9)))
