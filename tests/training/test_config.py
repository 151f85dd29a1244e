from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from eyas.core import UsageError
from eyas.training.config import TrainConfig

NAMES = {"target": "t", "data": "d", "out": "o"}


def test_settled_by_machine_and_width() -> None:
    cpu = TrainConfig(**NAMES).settled("cpu", 576)
    assert (cpu.unroll, cpu.batch_tokens, cpu.learning_rate) == (4, 768, 1e-3)
    gpu = TrainConfig(**NAMES).settled("cuda", 4096)
    assert (gpu.unroll, gpu.batch_tokens, gpu.learning_rate) == (7, 8192, 0.000141)
    told = TrainConfig(**NAMES, unroll=2, batch_tokens=99, learning_rate=1.0)
    assert told.settled("cuda", 64) == told


def test_to_json_and_back() -> None:
    made = TrainConfig(**NAMES, loss="acceptance", aux_layers="1,2")
    assert TrainConfig.from_dict(json.loads(json.dumps(asdict(made)))) == made
    with pytest.raises(UsageError, match="no setting 'speed'"):
        TrainConfig.from_dict({**NAMES, "speed": 3})


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"draft_vocab_size": -1},
        {"label_temperature": 0.0},
        {"clip": float("nan")},
        {"warmup": 1.5},
        {"loss": "hinge"},
        {"schedule": "step"},
        {"precision": "int8"},
        {"stop_after": 0.0},
    ],
    ids=str,
)
def test_what_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        TrainConfig(**NAMES, **wrong)


def test_what_a_resumed_training_may_change() -> None:
    begun = TrainConfig(**NAMES)
    TrainConfig(**{**NAMES, "out": "elsewhere"}, resume=True, stop_after=5.0, save_every=7).check_same(begun)
    with pytest.raises(UsageError, match="begun with learning_rate None, and now it is"):
        TrainConfig(**NAMES, learning_rate=0.1).check_same(begun)
