"""How much memory keys and values may take, in tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.core import DraftShape, UsageError
from eyas.drafter.contract import Drafter
from eyas.engine.engine import rows_for
from eyas.target.adapter import HFTarget
from eyas.target.packing import available_memory

GIB = 1 << 30


@dataclass(frozen=True)
class Memory:
    """On a GPU ``mem_fraction_static`` of it, weights included, as SGLang counts; on a CPU ``kv_cache_gib``."""

    mem_fraction_static: float = 0.85
    kv_cache_gib: float | None = None  # None: a quarter of what is free, at most 4

    def __post_init__(self) -> None:
        if not 0 < self.mem_fraction_static <= 1:
            raise UsageError(f"mem_fraction_static must be in (0, 1], got {self.mem_fraction_static}.")
        if self.kv_cache_gib is not None and not 0 < self.kv_cache_gib < 1 << 20:
            raise UsageError(f"kv_cache_gib must be above 0, got {self.kv_cache_gib}.")

    def kv_bytes(self, device: torch.device) -> int:
        """Bytes for keys and values, with the weights loaded already."""
        if device.type != "cuda" or self.kv_cache_gib is not None:
            return int(GIB * (self.kv_cache_gib or min(4, available_memory() / 4 / GIB)))
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(self.mem_fraction_static * total) - (total - free))


def kv_rows(
    target: HFTarget,
    drafter: Drafter | None,
    context_length: int,
    shape: DraftShape | None,
    max_running: int,
    memory: Memory | None = None,
) -> int:
    """Tokens whose keys and values fit, at most what all requests could use. Raises UsageError for less than one."""
    each = target.row_nbytes + (drafter.row_nbytes if drafter else 0)
    one = rows_for(context_length, shape)
    fits = (memory or Memory()).kv_bytes(target.device) // each
    if fits < one:
        raise UsageError(
            f"One request with a context of {context_length} tokens takes {one * each / GIB:.2f} GiB of keys and "
            f"values, and there is room for {fits * each / GIB:.2f}: give a shorter --context-length, or more with "
            f"{'--mem-fraction-static' if target.device.type == 'cuda' else '--kv-cache-gib'}."
        )
    return min(fits, one * max_running)
