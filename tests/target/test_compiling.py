"""Compiled steps: the same results, and one compilation for every number of rows that a cache may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import zoo
from torch._dynamo.utils import counters

from eyas.core import DraftShape, Request, SamplingParams
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.drafter.model import untrained
from eyas.engine.engine import Engine
from eyas.target.adapter import HFTarget


@pytest.fixture
def small_llama() -> HFTarget:
    return HFTarget(zoo.case("llama").model)


def answers(engine: Engine, lengths: list[int]) -> list[list[int]]:
    made = []
    for number, length in enumerate(lengths):
        prompt = zoo.case("llama").prompt(length, seed=number)
        engine.add(Request(str(number), prompt, SamplingParams(max_tokens=12)))
        made.append(
            [token.token_id for _ in range(100) if not engine.idle for o in engine.step() for token in o.emitted]
        )
    return made


def watched(steps: dict[tuple, Callable[..., Any]]) -> dict[tuple, list[None]]:
    """Has every compiled step note its calls."""
    calls: dict[tuple, list[None]] = {size: [] for size in steps}

    def noting(step: Callable[..., Any], size: tuple) -> Callable[..., Any]:
        return lambda *args: (calls[size].append(None), step(*args))[1]

    steps.update({size: noting(step, size) for size, step in steps.items()})
    return calls


def test_compiled_steps_are_used_at_every_length_and_change_nothing(small_llama, monkeypatch):
    """Slots grow with every prompt, and are longer than what is read behind the long one."""

    def engine() -> Engine:
        drafter = Eagle3Drafter(untrained(small_llama.hidden_size, small_llama.num_layers, small_llama.vocab_size))
        shape = DraftShape(2, 1, 3)
        return Engine(small_llama, drafter, shape=shape, context_length=480, max_running_requests=2)

    lengths = [20, 90, 200, 300, 450, 30]
    expected = answers(engine(), lengths)
    compiled = engine()
    for shape in (compiled.shape, DraftShape(1, 1, 2), None):
        compiled.runner.compile(1, shape)
    used = watched(small_llama._compiled) | watched(compiled.drafter._compiled)
    assert len(used) == 6, "two steps of the target, for any draft and for none; two readings, two chains"
    before = counters["frames"]["total"], counters["stats"]["unique_graphs"]
    as_it_is, decoding = small_llama._step, list[bool]()  # of steps that are not compiled, which ones read no prompt
    monkeypatch.setattr(small_llama, "_step", lambda *args: (decoding.append(args[-1] is None), as_it_is(*args))[1])
    assert answers(compiled, lengths) == expected
    assert (counters["frames"]["total"], counters["stats"]["unique_graphs"]) == before, "compiled anew while decoding"
    for size in ((1, 3, small_llama._layer_ids), ("follow", 1, 4), ("chain", 1, 2)):
        assert len(used[size]) > 2 * len(lengths), f"{size} was compiled for nothing"
    assert len(decoding) >= len(lengths) and not any(decoding), "a chain shortened at the end of an answer is padded"
    small_llama._compiled.clear()


def test_a_model_with_helpers_is_not_compiled():
    assert not HFTarget(zoo.case("llama4").model).compilable
    assert HFTarget(zoo.case("llama").model).compilable
