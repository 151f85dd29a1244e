"""What a training would do, how long it would take and how much memory, from a look at the data and a few updates."""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from eyas.training import vocabulary
from eyas.training.config import TrainConfig
from eyas.training.trainer import KEPT, Prepared, Report, Training, prepare, silent

MEASURED = 4  # updates, of which the first warms up


@dataclass(frozen=True)
class Plan:
    conversations: int
    held_out: int
    left_out: int  # too long, or nothing to draft in
    tokens: int  # of an epoch
    written: int  # of these, by the target
    draft_vocab_size: int
    coverage: float  # of what the target wrote
    parameters: int  # of the drafter, those that are trained
    updates: int
    tokens_per_update: float
    total_tokens: int
    unroll: int
    precision: str
    device: str
    peak_bytes: int  # of memory, measured: of the GPU, or of the process
    tokens_per_second: float  # measured
    seconds: float  # of training; evaluations and loading come on top


def plan(config: TrainConfig, report: Report = silent) -> Plan:
    """Loads everything and makes a few updates that are thrown away. Errors as for ``train``."""
    prepared = prepare(replace(config, resume=False, track=None), report)
    report("measuring a few updates")
    speed = measured_speed(prepared)
    found, settled, model = prepared.found, prepared.config, prepared.model
    tokens = int(found.lengths.sum())
    total = sum(
        int(prepared.data.lengths[list(rows)].sum()) for step in range(prepared.steps) for rows in prepared.course[step]
    )
    return Plan(
        conversations=len(found.rows),
        held_out=len(prepared.held_out),
        left_out=found.too_long + found.too_short,
        tokens=tokens,
        written=int(found.written.sum()),
        draft_vocab_size=model.config.draft_vocab_size,
        coverage=vocabulary.coverage(found.counts, model.draft_to_target.cpu().numpy()),
        parameters=sum(w.numel() for w in model.parameters() if w.requires_grad),
        updates=prepared.steps,
        tokens_per_update=total / prepared.steps,
        total_tokens=total,
        unroll=settled.unroll or 0,
        precision=str(prepared.frozen.dtype).removeprefix("torch."),
        device=str(prepared.target.device),
        peak_bytes=peak_bytes(prepared.target.device),
        tokens_per_second=speed,
        seconds=total / speed,
    )


def measured_speed(prepared: Prepared) -> float:
    """Tokens per second of a few updates, the first of which does not count unless it is the only one."""
    with tempfile.TemporaryDirectory() as folder:
        training = Training(prepared, Path(folder))
        (Path(folder) / KEPT).mkdir()
        updates = min(MEASURED, prepared.steps)
        for number in range(updates):
            if number <= 1:
                before, began = training.state.tokens, time.perf_counter()
            training.update()
        return (training.state.tokens - before) / (time.perf_counter() - began)


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
