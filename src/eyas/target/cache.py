"""KV storage in slots: allocated once, written at explicit rows, kept by gather. Lengths are its users' business."""

from __future__ import annotations

from collections.abc import Mapping
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

    @property
    def nbytes(self) -> int:
        """Of one token."""
        return self.heads * (self.key_size + self.value_size) * self.dtype.itemsize


class SlotCache:
    """Keys and values of every layer for a fixed number of rows, laid out as ``[slots, heads, length, size]``.

    ``layout`` decides how many slots of which length the rows make, and may be called at any time: many short sequences
    or few long ones share the same memory, and a batch is always a plain view. Sliding windows and chunks are the
    mask's business: a cache that drops old entries could not roll back.
    """

    def __init__(self, shapes: Mapping[int, LayerShape], rows: int):
        self.rows, self.slots, self.length = rows, 0, 0
        self.shapes = dict(shapes)
        # Zeros, not empty: a masked position still multiplies by 0, and 0 * NaN is NaN. Each layer has memory of its
        # own: a compiled step could not write to two of its arguments if they were parts of one.
        self._memory = {
            layer: tuple(
                torch.zeros(shape.heads * rows * size, dtype=shape.dtype, device=shape.device)
                for size in (shape.key_size, shape.value_size)
            )
            for layer, shape in self.shapes.items()
        }
        self._pools: list[torch.Tensor] = []  # [slots, heads, length, size]: a layer's keys, its values, the next's ...
        self.layout(1, rows)

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for pair in self._memory.values() for memory in pair)

    def layout(self, slots: int, length: int, used: tuple[int, int] | None = None) -> None:
        """From now on there are ``slots`` of ``length`` rows; what is in them stays, as far as it fits.

        ``used``: of which slots and rows that matters, the first so many of each; None: of all.
        """
        if slots * length > self.rows:
            raise ValueError(f"{slots} slots of {length} rows do not fit {self.rows} rows")
        if (slots, length) == (self.slots, self.length):
            return
        most_slots, most_rows = used or (self.slots, self.length)
        kept, rows = min(slots, self.slots, most_slots), min(length, self.length, most_rows)
        pools: list[torch.Tensor] = []  # if memory for a copy is lacking, the slots stay what they were
        for layer, shape in self.shapes.items():
            for memory, size in zip(self._memory[layer], (shape.key_size, shape.value_size), strict=True):
                after = memory[: slots * shape.heads * length * size].view(slots, shape.heads, length, size)
                if self._pools:
                    after[:kept, :, :rows] = self._pools[len(pools)][:kept, :, :rows].clone()  # of the same memory
                pools.append(after)
        self._pools, self.slots, self.length = pools, slots, length

    def views(self, slot: int, count: int, length: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """By layer: keys and values ``[count, heads, length, size]`` of neighbouring slots, to read and write."""
        parts = [pool[slot : slot + count, :, :length] for pool in self._pools]
        return dict(zip(self.shapes, zip(parts[::2], parts[1::2], strict=True), strict=True))

    def keep(self, slot: int, starts: torch.Tensor, path: torch.Tensor) -> None:
        """Makes row ``starts[b] + path[b, i]`` of slot + b its row ``starts[b] + i``, all at once.

        starts int64 [B]; path int64 [B, P]. What lies behind is free to be overwritten.
        """
        slots = torch.arange(slot, slot + len(path), device=path.device)[:, None]
        sources = starts[:, None] + path
        rows = starts[:, None] + torch.arange(path.shape[1], device=path.device)
        for pool in self._pools:
            pool[slots, :, rows] = pool[slots, :, sources]

    def copy(self, source: int, dest: int, rows: int) -> None:
        """Makes the first ``rows`` rows of a slot those of another."""
        for pool in self._pools:
            pool[dest, :, :rows] = pool[source, :, :rows]

    def clear(self, slot: int, count: int = 1, start: int = 0) -> None:
        """Zeroes slots from row ``start`` on: they may hold NaN, which a masked row would still spread."""
        for pool in self._pools:
            pool[slot : slot + count, :, start:].zero_()


class StepCache(Cache):
    """What a forward pass sees of the slots: it writes the block's rows and reads the first rows of the views."""

    def __init__(
        self,
        views: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
        starts: torch.Tensor,
        length: int | None = None,
    ):
        """``starts`` is int64 [B]; ``length`` rows are read (None: all)."""
        super().__init__(layers=[])
        self._views, self._starts, self._length = views, starts, length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes ``[B, heads, T, size]`` at rows ``starts``, ``starts + 1``, ...; returns what is to be read."""
        keys, values = self._views[layer_idx]
        batch, _, count, _ = key_states.shape
        slots = torch.arange(batch, device=keys.device)[:, None]
        rows = self._starts[:, None] + torch.arange(count, device=keys.device)
        keys[slots, :, rows] = key_states.transpose(1, 2)
        values[slots, :, rows] = value_states.transpose(1, 2)
        if self._length is None:
            return keys, values
        # not a slice, which would be compiled for lengths below the views' only
        return keys.narrow(2, 0, self._length), values.narrow(2, 0, self._length)

    # What transformers' mask builders ask of a cache. They run only for a block with images, at the start of a slot.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return (query_length if isinstance(query_length, int) else query_length.shape[0]), 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return next(iter(self._views.values()))[0].shape[2]

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


class ProbeCache(StepCache):
    """Records the shape of every layer's keys and values during one forward pass and stores nothing."""

    def __init__(self) -> None:
        super().__init__({}, torch.zeros(1, dtype=torch.long))
        self.shapes: dict[int, LayerShape] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes[layer_idx] = LayerShape(
            key_states.shape[1], key_states.shape[3], value_states.shape[3], key_states.dtype, key_states.device
        )
        return key_states, value_states

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return 1 << 20
