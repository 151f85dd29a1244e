"""Steps compiled ahead of their use, one for each size of batch, with as many cache rows as there happen to be.

Reading is one step for prompts of any length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, cast

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from eyas.target.packing import PRODUCT

Step = Callable[..., Any]
ANY = 0  # instead of a number of tokens: a step that takes whatever it is given
SOME = 48  # tokens that such a step is compiled with; another number than all others there, or they are taken for one


def compiled(function: Callable[..., Any], *bound: Any) -> Step:
    """``function`` as one graph. Nothing is compiled before its first call.

    Every result has a code object of its own: torch keeps what it compiled by code object, looks through all of it at
    every call, and gives up after a few.
    """
    f = cast(FunctionType, function)
    own = FunctionType(f.__code__.replace(), f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    options: dict[str, Any] = {
        # whoever calls has a step for each size, with the same model and kinds of tensors always: 1.5 ms a call
        "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
        "size_asserts": False,
        "post_grad_custom_pre_pass": SiblingsOnce(),
    }
    graph = torch.compile(own, fullgraph=True, dynamic=False, options=options)
    return lambda *args: graph(*bound, *args)


class SiblingsOnce(CustomGraphPass):
    """Layers that read the same each ask for the product of all of them: one of these products is enough."""

    ON_THE_WAY = (torch.ops.aten.constant_pad_nd.default, torch.ops.aten.view.default, torch.ops.aten.reshape.default)

    def __call__(self, graph: torch.fx.Graph) -> None:
        made: dict[Any, torch.fx.Node] = {}
        for node in list(graph.nodes):
            if node.target is PRODUCT or node.target in self.ON_THE_WAY:
                first = made.setdefault((node.target, str(node.args), str(node.kwargs)), node)
                if first is not node:
                    node.replace_all_uses_with(first)
                    graph.erase_node(node)

    def uuid(self) -> str:
        return "eyas siblings once 2"  # for torch's cache: to be counted up when this changes


def any_length(tensors: Iterable[torch.Tensor], dim: int) -> None:
    """Tells the compiler that this dimension of the arguments of a first call stands for any size above one."""
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, dim)
