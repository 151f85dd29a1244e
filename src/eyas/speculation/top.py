"""The largest of many numbers, and where it is."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 512


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each row and its column: the first one of equals. NaN is larger than any number.

    Args:
        x: any float dtype [..., V], V >= 1.

    Returns:
        Values [...] of the same dtype, and int64 [...].
    """
    width = x.shape[-1]
    if x.device.type != "cpu" or width < 2 * _CHUNK:
        values, columns = x.max(-1)
        return values, columns
    # On a CPU torch finds a maximum ten times faster than its place: look for the place in one chunk only.
    whole = width - width % _CHUNK
    peaks = x[..., :whole].unflatten(-1, (-1, _CHUNK)).amax(-1)
    if whole < width:
        peaks = torch.cat((peaks, x[..., whole:].amax(-1, keepdim=True)), -1)
    values, chunks = peaks.max(-1)
    # The last window reaches back into the chunk before it. Nothing there is as large: it would have come first.
    starts = (chunks * _CHUNK).clamp(max=width - _CHUNK)
    window = x.gather(-1, starts[..., None] + torch.arange(_CHUNK))
    return values, starts + window.argmax(-1)
