"""Counter-based Gumbel noise: a pure function of (seed, output index, token id), with no state to keep in step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment: odd, bits of the golden ratio
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB


def gumbel(seeds: Sequence[int] | int, indices: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise for every (output index, token) pair.

    Row i, column j depends on its seed, ``indices[i]`` and ``token_ids[j]`` only, to the bit: not on the shape, the
    order or the other entries. That is what lets drafter and target, plain decoding and verification share it.

    Args:
        seeds: any Python ints; taken modulo 2**64. One for all rows, or n of them, each for N / n rows in succession.
        indices: int64 [N], output indices (0 is the first generated token).
        token_ids: int64 [V], target token ids; its device is the result's.

    Returns:
        float32 [N, V], finite, between -2.9 and 37.5.
    """
    # The (index, token) grid of one seed is a family of splitmix64 streams (Steele, Lea, Flood 2014): each row starts
    # at a hashed, so practically random, state, and the token id counts the steps. Hashing between the levels is what
    # keeps neighbouring seeds, indices and tokens unrelated; adding them up into one counter would make rows shifted
    # copies of each other.
    bases = _bases((seeds,) if isinstance(seeds, int) else tuple(seeds), token_ids.device)
    rows = _finalise_(indices.to(token_ids.device).reshape(len(bases), -1) * _signed(_GOLDEN) + bases)
    bits = _finalise_(rows.reshape(-1, 1) + token_ids * _signed(_GOLDEN))

    # E = -log1p(-u) is exponential for uniform u, and -log(E) is Gumbel. float32 is enough because large noise, the
    # tail that lets unlikely tokens win, comes from u near 0, where floats are dense: u is made from a 53-bit integer
    # and keeps 24 significant bits down to 2**-54. Coarse is only u near 1, within some 2**-24: the smallest noise,
    # which matters only if a nearly certain token draws it: rarer than what the rounding of float32 logits changes.
    u = (bits.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)).float()
    u.add_(0.5).mul_(-(2.0**-53)).clamp_(min=-(1 - 2.0**-24))
    return u.log1p_().neg_().log_().neg_()


@lru_cache(maxsize=256)
def _bases(seeds: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 [n, 1]. Kept, as the same sequences come again step after step, and a copy to a GPU would wait for it."""
    return torch.tensor([_signed(_finalise_int(seed + _GOLDEN)) for seed in seeds], device=device)[:, None]


def _finalise_(z: Tensor) -> Tensor:
    """splitmix64's finaliser, in place on int64: products wrap, a logical shift is an arithmetic one and a mask."""
    for shift, multiplier in ((30, _MIX1), (27, _MIX2)):
        z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(multiplier))
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def _finalise_int(z: int) -> int:
    """The same on a Python int: a few seeds are not worth ten tensor operations."""
    z &= _MASK64
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK64
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK64
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    """The int64 with the same 64 bits: torch takes no unsigned scalars."""
    return z - (1 << 64) if z >> 63 else z
