"""The seam between the engine and whatever proposes draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from eyas.core import Draft, DraftShape, SamplingParams

if TYPE_CHECKING:
    import torch

    from eyas.speculation.sampling import TokenHistory
    from eyas.target.contract import Eagle3Target


class SequenceView(Protocol):
    """What a drafter may know of a running sequence."""

    @property
    def slot(self) -> int: ...

    @property
    def length(self) -> int:
        """Tokens in the target's cache: all but the last emitted one. ``extend`` has covered as many places."""

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def last_token(self) -> int: ...

    @property
    def output_index(self) -> int:
        """How many tokens were emitted: the index of the next one, which keys its noise."""

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    @property
    def history(self) -> TokenHistory | None:
        """Token counts for penalties; None where no penalty needs them."""


@dataclass(frozen=True)
class TrueStates:
    """What the target computed for T consecutive places of a sequence, and the tokens that followed them."""

    start: int  # the first place
    states: torch.Tensor  # [T, len(layer_ids) * H]
    tokens: torch.Tensor  # int64 [T], the token one place after each state
    image_mask: torch.Tensor | None = None  # bool [T], which of ``tokens`` stand for a piece of an image
    embeds: torch.Tensor | None = (
        None  # [T, H], what the target fed itself for ``tokens``: read where image_mask is set
    )


class Drafter(Protocol):
    """Proposes draft trees from the target's states. A parallel or block drafter fits the same calls."""

    layer_ids: tuple[int, ...]  # entry ids of the states ``extend`` takes, concatenated in this order

    def start(self, target: Eagle3Target, slots: int, rows: int) -> None:
        """Makes room for ``slots`` sequences of up to ``rows`` tokens and drafts of ``target``."""

    def clear(self, slot: int) -> None:
        """Forgets a slot down to its numbers: they may be NaN."""

    def extend(self, sequence: SequenceView, true: TrueStates) -> None:
        """Takes over what the target has computed, in order, without gaps; what was drafted there before is dropped."""

    def propose(self, sequences: Sequence[SequenceView], shape: DraftShape) -> list[Draft]:
        """One draft for each sequence, rooted at its last token, from all that ``extend`` has been given."""
