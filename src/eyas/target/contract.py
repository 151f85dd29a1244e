"""The seam between Eyas and any target model, in the names SGLang and vLLM use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from eyas.target.cache import SlotCache


@dataclass(frozen=True)
class Block:
    """Tokens appended to B neighbouring slots in one forward pass: a piece of a prompt, one token each, or a tree each.

    A token's place in its sequence is ``starts + depths``; its row in the cache is ``starts`` + its index in the block.
    Both agree for a run of consecutive tokens and differ for a tree.
    """

    tokens: torch.Tensor  # int64 [B, T]
    slot: int  # the first of the slots: slot .. slot + B - 1
    starts: torch.Tensor  # int64 [B] rows already in each slot
    length: int  # rows to look at: at least every start + T, at most the slots' length
    rope_deltas: torch.Tensor | None = None  # int64 [B], added to positions (multi-axis RoPE after an image)
    depths: torch.Tensor | None = None  # int64 [B, T]; None: 0, 1, ..., T-1
    ancestors: torch.Tensor | None = None  # bool [B, T, T], True where the column is the row or above it; None: causal


@dataclass(frozen=True)
class TargetOutput:
    logits: torch.Tensor  # [B, T, V], or [B, 1, V] where only those at ``ends`` were asked for
    states: torch.Tensor | None  # [B, T, len(layer_ids) * H], None while no layers are captured
    embeds: torch.Tensor | None = None  # [B, T, H], what entered layer 0: only for a block that carried images
    rope_delta: int = 0  # what this block's images did to the positions of the tokens that follow


class Eagle3Target(Protocol):
    """What EAGLE-3 needs of a target. Layer ids are entry ids: L is the state entering decoder layer L, 0 <= L <= n."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    context_length: int | None
    device: torch.device
    dtype: torch.dtype

    def set_eagle3_layers_to_capture(self, layer_ids: Sequence[int] | None) -> None: ...

    def get_embed_and_head(self) -> tuple[torch.Tensor, torch.Tensor]: ...

    def set_embed_and_head(self, embed: torch.Tensor, head: torch.Tensor) -> None: ...

    def new_cache(self, rows: int) -> SlotCache: ...

    def forward(
        self,
        block: Block,
        cache: SlotCache,
        *,
        ends: torch.Tensor | None = None,
        images: Mapping[str, Any] | None = None,
    ) -> TargetOutput:
        """``ends`` int64 [B]: the one place in each row of the block whose logits are wanted; None: all."""

    @property
    def compilable(self) -> bool: ...

    def compile(self, sequences: int, tokens: int | None) -> None: ...

    def image_positions(self, tokens: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor: ...
