"""What a probe concludes from what it measured, and how sure it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from eyas.bridges import hypotheses
from eyas.bridges.hypotheses import AS_READ, Facts, Hypothesis
from eyas.bridges.probe import Measured, _gain, _verdict
from eyas.bridges.trace import STAGES
from eyas.drafter.config import Eagle3Config
from eyas.drafter.dialects import LayerIds, Reading
from eyas.engine.stats import AcceptanceStats

CONFIG = Eagle3Config(32, 32, 48, 4, 2, 8, 160, 160, aux_layer_ids=(1, 2, 4))
READ = Hypothesis(AS_READ, "", CONFIG)
IDS = LayerIds((0, 1, 3), "output", "eagle_config.eagle_aux_hidden_state_layer_ids")
READING = Reading("sglang", (), (), CONFIG, IDS, {}, ())


def came_to(hypothesis: Hypothesis, length: float, agreement: float, better: Any = None) -> Measured:
    counts = AcceptanceStats(steps=100, emitted=round(100 * length))
    return Measured(hypothesis, counts, (length, length), agreement, better)


def shifted(by: int) -> Hypothesis:
    found = hypotheses.shifted(READ, by, 8)
    assert isinstance(found, Hypothesis)
    return found


@pytest.mark.parametrize("answers", [3, 12])
def test_how_sure_a_gain_is(answers):
    """Of answers of one length, Student's paired interval as SciPy has it."""
    random = np.random.default_rng(1)
    before, gains = random.random(answers), random.normal(0.02, 0.01, answers)
    rows = [np.stack((agreed * 66, np.full(answers, 66.0)), axis=1) for agreed in (before, before + gains)]
    right = stats.ttest_rel(before + gains, before).confidence_interval(0.99)
    assert _gain(*rows, 0.99) == pytest.approx((right.low, right.high), rel=0.02)


def test_one_answer_shows_nothing():
    rows = np.array([[10.0, 60.0]])
    assert _gain(rows, rows + 1, 0.99) == (-np.inf, np.inf)


def test_a_reading_that_is_surely_better():
    verdict = _verdict(READING, [came_to(READ, 1.5, 0.4), came_to(shifted(1), 1.6, 0.45, (0.01, 0.09))])
    assert verdict.name == "shift +1" and verdict.fault and "[2, 3, 5]" in verdict.text


def test_readings_that_may_be_better_are_named():
    rest = [came_to(shifted(-1), 1.4, 0.3, (-0.2, -0.1)), came_to(shifted(1), 1.6, 0.41, (-0.01, 0.03))]
    verdict = _verdict(READING, [came_to(READ, 1.5, 0.4), *rest])
    assert not verdict.fault and "shift +1" in verdict.text and "shift -1" not in verdict.text


def test_better_than_nothing_is_not_right():
    """Of a foreign drafter some reading is always a little less wrong, and surely so."""
    verdict = _verdict(READING, [came_to(READ, 1.01, 0.01), came_to(shifted(1), 1.02, 0.02, (0.001, 0.02))])
    assert verdict.name == "" and verdict.fault and "no reading" in verdict.text


def test_what_may_be_right_where_nothing_is_drafted():
    verdict = _verdict(READING, [came_to(READ, 1.01, 0.01), came_to(shifted(1), 1.6, 0.4, (-0.1, 0.9))])
    assert verdict.name == "" and verdict.fault and "shift +1 may be right" in verdict.text


def test_every_reading_is_another_and_says_where_an_engine_would_differ():
    config = replace(CONFIG, draft_vocab_size=2)
    read = replace(READ, config=config, ids=np.array([5, 8]))
    maps = {"d2t": np.array([5, 7]), "t2d": np.isin(np.arange(160), (5, 7))}
    made = list(hypotheses.others(read, Facts(8, {"rope_type": "default", "rope_theta": 5e5}, maps)))
    assert [type(m) for m in made] == [Hypothesis] * 7
    stages = {m.name: m.stage for m in made if isinstance(m, Hypothesis)}
    assert stages == {
        "shift -1": "states",
        "shift +1": "states",
        "d2t as ids": "d2t",
        "d2t from t2d": "d2t",
        "RoPE of the target": "rope",
        "norm_before_residual true": "layer",
        "norm_output true": "carried",
    }
    assert set(stages.values()) <= set(STAGES)
