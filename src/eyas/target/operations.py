"""Operations of PyTorch's that are ours: a compiled graph calls them instead of looking inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def register(schema: str, cpu: Callable[..., torch.Tensor], shape: Callable[..., torch.Tensor]) -> Any:
    """The operation ``eyas::`` of this schema: ``cpu`` computes it, ``shape`` makes an empty result of its layout.

    By these low-level calls it costs a compiled graph next to nothing. It lives as long as the process, whose first
    registration of a name stays.
    """
    name = schema.partition("(")[0]
    if not hasattr(torch.ops.eyas, name):
        torch.library.define(f"eyas::{name}", schema[len(name) :], tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(f"eyas::{name}", "CPU", cpu)
        torch.library.impl(f"eyas::{name}", "Meta", shape)
    return getattr(torch.ops.eyas, name).default
