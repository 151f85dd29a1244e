"""KV storage in slots: allocated once, written at explicit rows, kept by gather. Lengths are its users' business."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache

from eyas.core import TargetError


@dataclass(frozen=True)
class LayerShape:
    """One layer's KV per token. Key and value sizes differ under multi-head latent attention."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device


class SlotCache(Cache):
    """Keys and values of every layer, ``[slots, heads, length, size]``, behind transformers' ``Cache`` interface.

    Layers of one shape share a tensor, so keeping an accepted path is one gather for all of them. Sliding windows and
    chunks are the mask's business: a cache that drops old entries could not roll back.
    """

    def __init__(self, shapes: Mapping[int, LayerShape], slots: int, length: int):
        super().__init__(layers=[])
        self.slots, self.length = slots, length
        self._pools: list[tuple[torch.Tensor, torch.Tensor]] = []  # ([layers, slots, heads, length, size], the same)
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by layer
        for shape in dict.fromkeys(shapes.values()):
            layers = [layer for layer, s in shapes.items() if s == shape]
            size = (len(layers), slots, shape.heads, length)
            # zeros, not empty: a masked position still multiplies by 0, and 0 * NaN is NaN
            keys = torch.zeros(*size, shape.key_size, dtype=shape.dtype, device=shape.device)
            values = torch.zeros(*size, shape.value_size, dtype=shape.dtype, device=shape.device)
            self._pools.append((keys, values))
            self._views.update((layer, (keys[i], values[i])) for i, layer in enumerate(layers))
        self._slots: tuple[int, ...] = ()
        self._starts: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for pool in self._pools for t in pool)

    def begin(self, slots: tuple[int, ...], starts: tuple[int, ...], count: int) -> None:
        """The next forward pass appends ``count`` tokens to each of ``slots`` at row ``starts``."""
        if max(starts) + count > self.length:
            raise ValueError(f"{count} tokens at {max(starts)} do not fit a slot of {self.length}")
        self._slots, self._starts = slots, starts

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes ``[B, heads, T, size]`` where ``begin`` said; returns all rows up to the longest sequence's end."""
        count = key_states.shape[2]
        keys, values = self._views[layer_idx]
        if len(self._slots) == 1:
            slot, start = self._slots[0], self._starts[0]
            end = start + count
            keys[slot, :, start:end] = key_states[0]
            values[slot, :, start:end] = value_states[0]
            return keys[slot : slot + 1, :, :end], values[slot : slot + 1, :, :end]
        slots = torch.tensor(self._slots, device=keys.device)
        rows = torch.tensor(self._starts, device=keys.device)[:, None] + torch.arange(count, device=keys.device)
        keys[slots[:, None], :, rows] = key_states.transpose(1, 2)
        values[slots[:, None], :, rows] = value_states.transpose(1, 2)
        end = max(self._starts) + count
        return keys[slots, :, :end], values[slots, :, :end]

    def keep(self, slot: int, start: int, rows: Sequence[int]) -> None:
        """Makes ``start + rows[i]`` the row ``start + i``; what lies behind is free to be overwritten."""
        if list(rows) == list(range(len(rows))):
            return
        for pool in self._pools:
            for tensor in pool:
                source = torch.tensor(rows, device=tensor.device) + start
                tensor[:, slot, :, start : start + len(rows)] = tensor[:, slot].index_select(2, source)

    def clear(self, slot: int, start: int = 0) -> None:
        """Zeroes a slot from row ``start`` on: it may hold NaN, which a masked row would still spread."""
        for pool in self._pools:
            for tensor in pool:
                tensor[:, slot, :, start:].zero_()

    # What transformers' mask builders ask of a cache. They run only for a block at the start of a single slot.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._starts[0] if self._starts else 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        count = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length(layer_idx) + count, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.length

    @property
    def is_compileable(self) -> bool:
        return False

    def _cannot(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TargetError(
            "This model asks its cache for more than keys and values (a recurrent, convolution or indexer state), "
            "which cannot be rolled back to an accepted path: it cannot be a target."
        )

    update_conv_state = update_recurrent_state = update_indexer = _cannot
    get_conv_state = get_recurrent_state = has_previous_state = _cannot


class ProbeCache(SlotCache):
    """Records the shape of every layer's keys and values during one forward pass and stores nothing."""

    def __init__(self) -> None:
        super().__init__({}, slots=1, length=1 << 20)
        self.begin((0,), (0,), 1)
        self.shapes: dict[int, LayerShape] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes[layer_idx] = LayerShape(
            key_states.shape[1], key_states.shape[3], value_states.shape[3], key_states.dtype, key_states.device
        )
        return key_states, value_states
