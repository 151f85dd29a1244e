"""How much memory keys and values get: never more than there is, never more than can be used, or a clear refusal."""

from __future__ import annotations

import pytest
import torch
from engine.harness import random_drafter, target_of

from eyas.core import DraftShape, UsageError
from eyas.drafter.eagle3 import Eagle3Drafter
from eyas.engine import memory
from eyas.engine.engine import Engine, rows_for, spare_rows
from eyas.engine.llm import LLM
from eyas.engine.memory import GIB, Memory, kv_rows

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NAME = "llama"
TARGET_ROW = 4 * 2 * 2 * 8 * 4  # bytes: layers, keys and values, heads, their size, float32
ONE = 193  # 128 tokens and a draft, in steps of 64, and one that is never looked at


def gib(rows: float, each: int = TARGET_ROW) -> Memory:
    """Memory for so many rows."""
    return Memory(kv_cache_gib=rows * each / GIB)


@pytest.mark.parametrize(
    "settings",
    [{"mem_fraction_static": x} for x in (0, -0.1, 1.01, float("nan"))]
    + [{"kv_cache_gib": x} for x in (0, -1, float("inf"), float("nan"))],
    ids=str,
)
def test_impossible_settings(settings):
    with pytest.raises(UsageError, match=next(iter(settings))):
        Memory(**settings)


def test_on_a_cpu_a_quarter_of_what_is_free_and_at_most_four(monkeypatch):
    for free, given in ((8, 2), (1, 0.25), (16, 4), (1000, 4)):
        monkeypatch.setattr(memory, "available_memory", lambda free=free: free * GIB)
        assert Memory().kv_bytes(CPU) == given * GIB
        assert Memory(mem_fraction_static=0.1).kv_bytes(CPU) == given * GIB, "a fraction is for GPUs"
    assert Memory(kv_cache_gib=0.5).kv_bytes(CPU) == GIB // 2


def test_on_a_gpu_the_fraction_counts_what_is_taken_already(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))  # weights take 20
    assert Memory(mem_fraction_static=0.5).kv_bytes(GPU) == 20 * GIB
    assert Memory(mem_fraction_static=0.25).kv_bytes(GPU) == Memory(mem_fraction_static=0.1).kv_bytes(GPU) == 0
    assert Memory(mem_fraction_static=0.5, kv_cache_gib=3).kv_bytes(GPU) == 3 * GIB


def test_rows_of_one_request():
    """The context, a draft behind it, and no more than what it takes to have few sizes."""
    assert rows_for(128) == ONE and rows_for(100, DraftShape(3, 4, 24)) == 129 and rows_for(110) == 129
    for context in (1, 48, 49, 500, 8192, 131072):
        for shape in (DraftShape(), DraftShape(3, 4, 24), DraftShape(20, 1, 21), DraftShape(4, 8, 9)):
            need = context + spare_rows(shape)
            assert need < rows_for(context, shape) <= need + max(64, need // 4)
    assert spare_rows(DraftShape(2, 16, 64)) >= 64, "all nodes of a draft"
    assert spare_rows(DraftShape(6, 8, 9)) > 8 * 5, "all that a drafter tries for a few nodes"


def test_as_much_as_fits_and_as_all_requests_can_use():
    target = target_of(NAME)
    assert target.row_nbytes == TARGET_ROW
    assert kv_rows(target, None, 128, None, 5, gib(1000.5)) == 5 * ONE
    assert kv_rows(target, None, 128, None, 6, gib(1000.5)) == 1000
    assert kv_rows(target, None, 128, None, 1, gib(1000.5)) == ONE == kv_rows(target, None, 128, None, 9, gib(ONE))


def test_the_drafter_has_rows_of_its_own():
    target, drafter = target_of(NAME), random_drafter(NAME)
    assert isinstance(drafter, Eagle3Drafter) and drafter.row_nbytes > 0
    each = TARGET_ROW + drafter.row_nbytes
    assert kv_rows(target, drafter, 128, None, 9, gib(400, each)) == 400
    drafter.start(target, 400)
    assert drafter.cache.nbytes == 400 * drafter.row_nbytes
    assert target.new_cache(400).nbytes == 400 * TARGET_ROW


def test_less_than_one_request_is_refused():
    with pytest.raises(UsageError) as caught:
        kv_rows(target_of(NAME), None, 128, None, 4, gib(ONE - 1))
    for said in ("context of 128 tokens", "--context-length", "--kv-cache-gib"):
        assert said in str(caught.value)
    with pytest.raises(UsageError, match="a context of 128"):
        LLM(target_of(NAME), context_length=128, memory=gib(ONE - 1))
    with pytest.raises(UsageError, match=f"holds {ONE - 1} tokens, .* takes {ONE}"):
        Engine(target_of(NAME), context_length=128, kv_rows=ONE - 1)


def test_on_a_gpu_the_refusal_names_the_gpus_setting(monkeypatch):
    class Elsewhere:
        device, row_nbytes = GPU, TARGET_ROW

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 * GIB, 80 * GIB))
    with pytest.raises(UsageError, match=r"room for 0\.00: .* --mem-fraction-static"):
        kv_rows(Elsewhere(), None, 128, None, 4, Memory(mem_fraction_static=0.2))


def test_the_engine_allocates_exactly_that():
    engine = LLM(target_of(NAME), context_length=128, memory=gib(500), max_running_requests=8).engine
    assert engine.runner.cache.rows == engine.scheduler.rows == 500
    assert engine.runner.cache.nbytes == 500 * TARGET_ROW
