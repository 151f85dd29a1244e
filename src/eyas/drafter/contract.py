"""The seam between the engine and whatever proposes draft tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from eyas.core import Draft, DraftShape, Request

if TYPE_CHECKING:
    import torch

    from eyas.speculation.sampling import Rows
    from eyas.target.contract import Eagle3Target


class SequenceView(Protocol):
    """What a drafter may know of a running sequence beyond tensors."""

    @property
    def request(self) -> Request: ...

    @property
    def length(self) -> int:
        """Tokens in the target's cache: all but the last emitted one."""

    @property
    def output_ids(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class TrueStates:
    """What the target computed for consecutive places of B sequences in neighbouring slots.

    Sequence b has ``counts[b]`` of them, from place ``starts[b]``; what lies behind these is padding to T.
    """

    slot: int  # the first of the slots
    starts: torch.Tensor  # int64 [B]
    counts: torch.Tensor  # int64 [B], 0 where there is nothing for a sequence
    states: torch.Tensor  # [B, T, len(layer_ids) * H]
    tokens: torch.Tensor  # int64 [B, T], the token one place after each state
    length: int  # rows to look at: at least every start + T
    image_mask: torch.Tensor | None = None  # bool [B, T], which of ``tokens`` stand for a piece of an image
    embeds: torch.Tensor | None = None  # [B, T, H], what the target fed itself for ``tokens``: read where image_mask


@dataclass(frozen=True)
class Drafting:
    """For whom to draft: the sequences in slots 0 .. B - 1."""

    sequences: Sequence[SequenceView | None]  # [B]; None: nobody is there, or nobody who wants a draft; computed anyway
    lengths: torch.Tensor  # int64 [B] places that ``extend`` has covered; the root's place
    roots: torch.Tensor  # int64 [B] the last emitted tokens
    rows: Rows  # how each sequence chooses its tokens
    length: int  # rows to look at: at least lengths + what the draft writes (``drafted_rows``)
    # Where sequences are constrained, what may follow nodes (int64 [B, F, depth], ``TreeBuilder.paths``) as
    # ``draft_scores`` takes it. To be asked at every depth: what nobody may choose is no use in a draft.
    allowed: Callable[[torch.Tensor], torch.Tensor] | None = None


def drafted_rows(shape: DraftShape) -> int:
    """Rows that a draft writes behind the true ones while it grows: every frontier but the last."""
    return shape.eagle_topk * (shape.num_steps - 1)


class Drafter(Protocol):
    """Proposes draft trees from the target's states. A parallel or block drafter fits the same calls.

    Its slots are those of the target's cache: the engine lays out, copies and clears both together.
    """

    layer_ids: tuple[int, ...]  # entry ids of the states ``extend`` takes, concatenated in this order

    @property
    def row_nbytes(self) -> int:
        """Keys and values of one token."""

    def start(self, target: Eagle3Target, rows: int) -> None:
        """Makes room for ``rows`` tokens of ``target`` in all slots together."""

    def layout(self, slots: int, length: int, used: tuple[int, int] | None = None) -> None:
        """From now on there are so many slots of so many rows; what is in them stays, as far as it fits.

        ``used``: of which slots and rows that matters, the first so many of each; None: of all.
        """

    def copy(self, source: int, dest: int, rows: int) -> None:
        """Makes the first ``rows`` rows of a slot those of another, and where it would draft from."""

    def clear(self, slot: int, count: int = 1) -> None:
        """Forgets slots down to their numbers: they may be NaN."""

    def extend(self, true: TrueStates) -> None:
        """Takes over what the target has computed, in order, without gaps; what was drafted there before is dropped."""

    def compile(self, sequences: int, tokens: int | None, shape: DraftShape | None) -> None:
        """Has ``extend`` by ``tokens`` each (None: any number) and ``propose`` run compiled for so many sequences.

        Where that can be; no ``propose`` without a ``shape``.
        """

    def propose(self, drafting: Drafting, shape: DraftShape) -> Draft:
        """One draft for each sequence, rooted at its last token, from all that ``extend`` has been given."""
