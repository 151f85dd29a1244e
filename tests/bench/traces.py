"""Traces as PyTorch's profiler writes them, by hand: times in microseconds."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DECODES = "execute_context_0(0)_generation_2(8)"
READS = "execute_context_1(64)_generation_2(2)"


def event(cat: str, name: str, ts: float, dur: float, pid: int | str = 1, tid: int | str = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": {"stream": tid}}


def kernel(name: str, ts: float, dur: float, stream: int = 7, device: int = 0) -> dict[str, Any]:
    kind = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(name.split()[0], "kernel")
    return event(kind, name, ts, dur, device, stream)


def write(path: Path, events: Sequence[Any], **more: Any) -> Path:
    """With what else is in such a file."""
    begun = [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}}]
    instant = [{"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 9e9}]
    content = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "a GPU"}], "traceEvents": []} | more
    content["traceEvents"] = [*begun, *events, *instant]
    text = json.dumps(content).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def gpu_steps(count: int, length: float, reduce: float, first: float = 1000.0) -> list[dict[str, Any]]:
    """``count`` decode passes and one that is cut off, each of ``length``: 400 of attention and products, ``reduce`` of
    all-reduce; the rest is nobody's.
    """
    found = []
    for at in (first + n * length for n in range(count + 1)):
        found += [
            event("user_annotation", DECODES, at - 200, 100, 4711, 4711),
            event("gpu_user_annotation", DECODES, at, 400 + reduce, 0, 7),
            kernel("void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64>>(Flash_fwd_params)", at, 100),
            kernel("nvjet_tst_64x24_64x16_4x1_v_bz_TNT", at + 100, 300),
            kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", at + 400, reduce),
        ]
    return found
