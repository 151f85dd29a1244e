"""Attention masks for a block on top of what its slots hold, one per kind of attention the target's layers use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from eyas.core import TargetError
from eyas.target.contract import Block
from eyas.target.tuning import ATTENTION


@dataclass(frozen=True)
class MaskKinds:
    """Which kinds of attention a target's layers use, and how its forward wants the masks."""

    kinds: tuple[str, ...]  # of full_attention, sliding_attention, chunked_attention
    window: int
    chunk: int
    additive: bool  # float masks for eager attention, bool for sdpa

    @classmethod
    def from_config(cls, config: Any) -> MaskKinds:
        """Reads a text config as ``transformers.masking_utils.create_masks_for_generate`` does.

        Raises TargetError for attention implementations or layer kinds that cannot take a tree mask.
        """
        implementation = config._attn_implementation
        if implementation not in ("sdpa", ATTENTION, "eager"):
            raise TargetError(
                f"Attention implementation {implementation!r} takes no tree mask; load the model with "
                "attn_implementation='sdpa', or 'eager' where the model has no sdpa."
            )
        window = getattr(config, "sliding_window", None) or 0
        chunk = getattr(config, "attention_chunk_size", None) or 0
        if (types := getattr(config, "layer_types", None)) is not None:
            kinds = tuple(sorted(set(types)))
        else:
            kinds = ("sliding_attention" if window else "chunked_attention" if chunk else "full_attention",)
        known = {"full_attention": True, "sliding_attention": window > 0, "chunked_attention": chunk > 0}
        for kind in kinds:
            if kind not in known:
                raise TargetError(
                    f"Layers of kind {kind!r} keep more than keys and values, or hide some of them by rules a tree "
                    "mask cannot express: this model cannot be a target."
                )
            if not known[kind]:
                raise TargetError(f"The config names layers of kind {kind!r} but gives no size for it.")
        return cls(kinds, window, chunk, additive=implementation == "eager")

    def build(self, block: Block, dtype: torch.dtype) -> torch.Tensor | dict[str, torch.Tensor]:
        """Masks ``[B, 1, T, S]``, S being the rows looked at: one tensor, or one per kind where kinds are mixed."""
        seen, query, key = visible(block)
        masks = {kind: self._one(kind, seen, query, key, dtype) for kind in self.kinds}
        return next(iter(masks.values())) if len(masks) == 1 else masks

    def _one(
        self, kind: str, seen: torch.Tensor, query: torch.Tensor, key: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        if kind == "sliding_attention":
            seen = seen & (key[:, None, :] > query[:, :, None] - self.window)
        elif kind == "chunked_attention":
            seen = seen & (key[:, None, :] // self.chunk == query[:, :, None] // self.chunk)
        seen = seen[:, None]
        if not self.additive:
            return seen
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def visible(block: Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Who may see whom, before windows: (bool [B, T, S], the queries' places [B, T], the keys' places [B, S])."""
    rows, count = block.tokens.shape
    device = block.tokens.device
    starts = block.starts[:, None]
    index = torch.arange(count, device=device)
    query = starts + (index if block.depths is None else block.depths)
    columns = torch.arange(block.length, device=device).expand(rows, -1)
    if block.ancestors is None:
        return columns[:, None, :] <= query[:, :, None], query, columns
    inner = columns - starts  # the column's index in the block; negative: in the prefix; >= count: beyond
    in_block = inner.clamp(0, count - 1)
    key = torch.where(inner < 0, columns, query.gather(1, in_block))
    tree = block.ancestors.gather(2, in_block[:, None, :].expand(rows, count, -1))
    inside = (inner >= 0) & (inner < count)
    return (inner < 0)[:, None, :] | (inside[:, None, :] & tree), query, key
