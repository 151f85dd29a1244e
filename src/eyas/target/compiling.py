"""Steps compiled ahead of their use, one for each size of batch, with as many cache rows as there happen to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, cast

import torch

Step = Callable[..., Any]


def compiled(function: Callable[..., Any], *bound: Any) -> Step:
    """``function`` as one graph. Nothing is compiled before its first call.

    Every result has a code object of its own: torch keeps what it compiled by code object, looks through all of it at
    every call, and gives up after a few.
    """
    f = cast(FunctionType, function)
    own = FunctionType(f.__code__.replace(), f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    graph = torch.compile(own, fullgraph=True, dynamic=False)
    return lambda *args: graph(*bound, *args)


def any_length(tensors: Iterable[torch.Tensor], dim: int) -> None:
    """Tells the compiler that this dimension of the arguments of a first call stands for any size above one."""
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, dim)
