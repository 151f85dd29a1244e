"""Compiled steps: the same results, and one compilation for every number of rows that a cache may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from torch._dynamo.utils import counters

from eyas.core import DraftShape, Request, SamplingParams
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.drafter.model import untrained
from eyas.engine.engine import Engine
from eyas.target.adapter import HFTarget
from eyas.target.compiling import ANY
from eyas.target.contract import Block, TargetOutput
from eyas.target.tuning import tune


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


@pytest.mark.parametrize(("name", "tuned"), [("llama", False), ("llama", True), ("gemma3", False)])
def test_prompts_of_any_length_are_read_by_one_compiled_step(name, tuned):
    """Gemma 3 has a mask for each of two kinds of layers; what is tuned has other code for few tokens."""
    model = zoo.case(name).build() if tuned else zoo.case(name).model
    assert not tuned or tune(model, smallest=0).packed
    target = HFTarget(model)
    prompt = torch.tensor([zoo.case(name).prompt(200, seed=1)])
    pieces = [(0, 7), (7, 9), (9, 60), (60, 61), (61, 200), (0, 200), (0, 2), (2, 5), (5, 11)]

    def read() -> list[TargetOutput]:
        cache = target.new_cache(256)
        target.set_eagle3_layers_to_capture((1, 2))
        blocks = [Block(prompt[:, a:b], 0, torch.tensor([a]), b) for a, b in pieces]
        return [target.forward(block, cache, ends=torch.tensor([block.tokens.shape[1] - 1])) for block in blocks]

    expected = read()
    target.compile(1, None)
    used = watched(target._compiled)
    before = counters["frames"]["total"], counters["stats"]["unique_graphs"]
    for output, other in zip(read(), expected, strict=True):
        torch.testing.assert_close(output.logits, other.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(output.states, other.states, rtol=1e-4, atol=1e-4)
    assert (counters["frames"]["total"], counters["stats"]["unique_graphs"]) == before, "compiled anew while reading"
    assert [len(calls) for calls in used.values()] == [len(pieces) - 1], "all but the piece of one token"
    target._compiled.clear()


def test_reading_compiled_changes_no_answer(small_llama):
    """Pieces of a chunk's size, and what is left of a prompt behind them; two prompts together are read as before."""

    def engine() -> Engine:
        drafter = Eagle3Drafter(untrained(small_llama.hidden_size, small_llama.num_layers, small_llama.vocab_size))
        settings = {"context_length": 480, "max_running_requests": 2, "chunked_prefill_size": 64}
        return Engine(small_llama, drafter, shape=DraftShape(2, 1, 3), **settings)

    lengths = [20, 90, 3, 65, 300, 2]
    expected = answers(engine(), lengths)
    compiled = engine()
    compiled.runner.compile_reading()
    used = watched(small_llama._compiled) | watched(compiled.drafter._compiled)
    before = counters["frames"]["total"]
    assert answers(compiled, lengths) == expected
    assert counters["frames"]["total"] == before, "compiled anew while reading"
    assert len(used[1, ANY, small_llama._layer_ids]) == 1 + 2 + 1 + 1 + 5 + 1, "pieces of more than one token"
    assert len(used["follow", 1, ANY]) > 10
    small_llama._compiled.clear()


def test_an_engine_compiles_reading_and_decoding(small_llama, caplog):
    engine = Engine(small_llama, context_length=100, max_running_requests=1)
    told = list[tuple[str, float]]()
    engine.compile(lambda what, share: told.append((what, share)))
    assert {size[:2] for size in small_llama._compiled} == {(1, ANY), (1, 1)}
    assert not [record for record in caplog.records if record.name.startswith("eyas")]
    assert told == [("compiling steps: prompts", 0.0), ("compiling steps: 1 x plain", 0.5)]
    small_llama._compiled.clear()


def test_reading_that_cannot_be_compiled_is_said(small_llama, caplog, monkeypatch):
    engine, compile_ = Engine(small_llama, context_length=100), small_llama.compile

    def only_sizes(sequences: int, tokens: int | None) -> None:
        if tokens is None:
            raise RuntimeError("it wants to know")
        compile_(sequences, tokens)

    monkeypatch.setattr(small_llama, "compile", only_sizes)
    engine.compile()
    assert "Prompts are read without compiled steps (RuntimeError: it wants to know)" in caplog.text
    assert {size[:2] for size in small_llama._compiled} == {(1, 1)}
    small_llama._compiled.clear()


def test_a_model_with_helpers_is_not_compiled():
    assert not HFTarget(zoo.case("llama4").model).compilable
    assert HFTarget(zoo.case("llama").model).compilable
