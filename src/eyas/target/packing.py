"""Linear layers that multiply by packed weights: oneDNN's own blocked layout, siblings as one product.

A decoding step multiplies few rows by all weights, so it takes as long as reading them. oneDNN reads a weight that
already lies in its layout in half the time, or less. Layers that read the same input (queries, keys and values; gate
and up) are one larger product: fewer, longer reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import nn

from eyas.target.operations import register

SMALLEST = 1 << 16  # elements; below, a call of oneDNN costs more than the layout saves
MARGIN = 2 << 30  # bytes of memory that packing must leave free, for the cache and everybody else
ROWS = 8  # what the layout is chosen for; it serves any number of rows
FEWEST = 6  # rows: oneDNN takes a sixth longer with one; worth it where compiled code pads them in passing
PACKED = "_eyas_packed"  # the attribute of a weight that holds its packed copy, or that of its layer's siblings

Families = Sequence[Sequence[nn.Linear]]


class PackedLinear(nn.Linear):
    """A linear layer that multiplies by the packed copy of its weight while there is one and it is up to date."""

    siblings: Siblings

    def pack(self) -> None:
        """Makes the packed copy, unless one is up to date, or a weight has become one that cannot be packed."""
        weights, biases = self.siblings.parameters()
        if _packed_copy(weights, biases) is None and all(packable(x, smallest=0) for x in self.siblings.layers):
            setattr(weights[0], PACKED, _Packed(weights, biases))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad):
            return F.linear(x, self.weight, self.bias)  # the packed product has no gradient
        return self.siblings.product(self, x)


class Siblings:
    """Layers of one module that read the same input one after another; or one layer by itself.

    The first of them that is called computes all, and the others take theirs.
    """

    def __init__(self, layers: Sequence[nn.Linear]):
        self.layers = tuple(layers)
        ends = list(accumulate(layer.weight.shape[0] for layer in layers))
        self.bounds = tuple(zip([0, *ends[:-1]], ends, strict=True))
        # an input and its version, every layer's output, who has yet to take theirs: at once, for threads on one model
        self._held: tuple[torch.Tensor, int | None, torch.Tensor, set[int]] | None = None

    def parameters(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Weights and biases as they are now."""
        return [layer.weight for layer in self.layers], [layer.bias for layer in self.layers]

    def product(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """What ``layer`` makes of ``x`` [..., in]: [..., out], a view of what all make of it."""
        if torch.compiler.is_compiling():  # the same for every sibling: the compiler makes one of them
            out = self._traced(x)
        elif len(self.layers) == 1:
            out = _packed_linears(x, *self.parameters())
        else:
            out = self._together(layer, x)
        if len(self.layers) == 1:
            return out
        begin, end = self.bounds[self.layers.index(layer)]
        return out[..., begin:end]

    def _traced(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        if rows >= FEWEST:
            return PRODUCT(x, *self.parameters())
        padded = F.pad(x.reshape(rows, -1), (0, 0, 0, FEWEST - rows))
        return PRODUCT(padded, *self.parameters())[:rows].reshape(*x.shape[:-1], -1)

    def _together(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        held, version = self._held, None if x.is_inference() else x._version
        if held is None or held[0] is not x or held[1] != version:
            out = _packed_linears(x, *self.parameters())
            held = self._held = (x, version, out, {id(sibling) for sibling in self.layers})
        held[3].discard(id(layer))
        if not held[3]:
            self._held = None
        return held[2]


def pack_linears(
    model: nn.Module, *, smallest: int = SMALLEST, margin: int = MARGIN, families: Families = ()
) -> tuple[int, int, str | None]:
    """Makes the linear layers ``PackedLinear``: how many are, their bytes, and why not all or none of them are.

    ``families``: layers that read the same input one after another (``find_families``).
    """
    layers = list(_packable_layers(model, smallest))
    if not layers:
        return 0, 0, "no linear layer is worth packing here: none on the CPU, none large enough, or no oneDNN for it"
    needed, available = packed_nbytes(model, smallest=smallest), available_memory()
    if needed and available - needed < margin:
        return (
            0,
            0,
            f"packing the linear layers takes {needed / 2**30:.1f} GiB, which would leave less than "
            f"{margin / 2**30:.1f} GiB of the {available / 2**30:.1f} GiB of memory that is available",
        )
    related = {id(layer): siblings for siblings in map(Siblings, families) for layer in siblings.layers}
    for layer in layers:
        if id(layer) in related or not isinstance(layer, PackedLinear):
            layer.__class__ = PackedLinear
            layer.siblings = related.get(id(layer)) or Siblings([layer])
    for layer in layers:
        layer.pack()
    return len(layers), sum(weight.nbytes for weight in _distinct(layers)), None


def packed_nbytes(model: nn.Module, *, smallest: int = SMALLEST) -> int:
    """The memory that packing ``model`` takes, beyond its weights and what is packed already."""
    weights = _distinct(layer for layer in _packable_layers(model, smallest) if not _is_packed(layer))
    return sum(weight.nbytes for weight in weights)


def packable(layer: nn.Module, smallest: int = SMALLEST) -> bool:
    """Whether it is a plain linear layer on the CPU whose weight oneDNN packs and that is large enough to gain."""
    if type(layer) not in (nn.Linear, PackedLinear) or "forward" in vars(layer):
        return False
    weight, bias = layer.weight, layer.bias
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.numel() >= smallest
        and weight.is_contiguous()
        and not weight.is_inference()  # writes to such a tensor are not counted
        and (bias is None or (bias.device, bias.dtype) == (weight.device, weight.dtype))
        and _packs(weight.dtype)
    )


def _packable_layers(model: nn.Module, smallest: int) -> Iterator[Any]:
    return (module for module in model.modules() if packable(module, smallest))


def _distinct(layers: Any) -> list[torch.Tensor]:
    return list({id(layer.weight): layer.weight for layer in layers}.values())


def _is_packed(layer: nn.Module) -> bool:
    return isinstance(layer, PackedLinear) and _packed_copy(*layer.siblings.parameters()) is not None


# Who reads the same


@torch.no_grad()
def find_families(model: Any, run: Callable[[], Any], *, smallest: int = SMALLEST) -> list[list[nn.Linear]]:
    """Layers with one parent and one width that read the very same tensor, one after another, while ``run`` runs."""
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    candidates = [layer for layer in _packable_layers(model, smallest) if layer in parents]
    if len(candidates) < 2:
        return []
    calls: list[tuple[nn.Linear, torch.Tensor]] = []
    with _noting(candidates, calls):
        run()
    families: list[list[nn.Linear]] = []
    before: tuple[nn.Linear, torch.Tensor] | None = None
    for layer, x in calls:
        if before is not None and x is before[1] and parents[layer] is parents[before[0]]:
            families[-1].append(layer)
        else:
            families.append([layer])
        before = layer, x
    often = [layer for family in families for layer in family]
    return [f for f in families if len(f) > 1 and all(often.count(layer) == 1 for layer in f) and _alike(f)]


def _alike(family: Sequence[nn.Linear]) -> bool:
    return len({(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in family}) == 1


@contextmanager
def _noting(layers: Sequence[nn.Linear], calls: list[tuple[nn.Linear, torch.Tensor]]) -> Iterator[None]:
    hooks = [layer.register_forward_pre_hook(lambda layer, args: calls.append((layer, args[0]))) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# The product


class _Packed:
    """Weights in oneDNN's layout, one under the other, with what they were made from.

    It hangs on the first weight itself: a compiled function is handed the model's weights, and finds it there.
    """

    __slots__ = ("bias", "identity", "matrix", "sources")

    def __init__(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]):
        # keeps the memory, so that its address cannot become that of other values
        self.sources = [part.detach() for part in _parts(weights, biases)]
        self.identity = _identity(weights, biases)
        together = torch.cat(self.sources[: len(weights)]) if len(weights) > 1 else self.sources[0]
        self.matrix = torch.ops.mkldnn._reorder_linear_weight.default(together, ROWS)
        self.bias = torch.cat(self.sources[len(weights) :]) if len(self.sources) > len(weights) else None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # saved or copied with its weight, it is left out: the layout is this process's own


def _parts(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """What is copied: a single layer's bias is not, and may differ where layers share a weight."""
    return [*weights, *(bias for bias in biases if bias is not None and len(weights) > 1)]


def _identity(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    return tuple((part.data_ptr(), part.dtype, part.stride(), part._version) for part in _parts(weights, biases))


def _packed_copy(weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> _Packed | None:
    """The packed copy of these very values; one of former values is dropped."""
    packed = getattr(weights[0], PACKED, None)
    if packed is None:
        return None
    if any(part.is_inference() for part in _parts(weights, biases)) or packed.identity != _identity(weights, biases):
        delattr(weights[0], PACKED)
        return None
    return packed


def _packed_linears(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """x [..., in] times each weight [out, in], the results side by side [..., sum of out]."""
    packed = _packed_copy(weights, biases)
    if packed is None or x.dtype != weights[0].dtype or not x.numel():
        parts = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    bias = biases[0] if len(weights) == 1 else packed.bias
    return torch.ops.mkldnn._linear_pointwise.default(x, packed.matrix, bias, "none", [], "")


def _packed_linears_shape(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], sum(weight.shape[0] for weight in weights)))


PRODUCT = register(
    "packed_linears(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor", _packed_linears, _packed_linears_shape
)


@cache
def _packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this type on this machine, and multiplies by them correctly: tried once."""
    ops = torch.ops.mkldnn
    try:
        native: dict[torch.dtype, Callable[[], bool]] = {
            torch.float32: torch.backends.mkldnn.is_available,
            torch.bfloat16: ops._is_mkldnn_bf16_supported,
            torch.float16: ops._is_mkldnn_fp16_supported,
        }
        if dtype not in native or not native[dtype]():
            return False
        x, weight = (torch.linspace(-1, 1, n * 48, dtype=dtype).view(n, 48) for n in (3, 80))
        matrix = ops._reorder_linear_weight.default(weight, ROWS)
        product = ops._linear_pointwise.default(x, matrix, None, "none", [], "")
        return torch.allclose(product.double(), F.linear(x.double(), weight.double()), rtol=2e-2, atol=2e-2)
    except (AttributeError, RuntimeError):  # a PyTorch without these operations, or a processor they refuse
        return False


def available_memory() -> int:
    """Bytes that can be allocated without swapping, by the machine and by the container's limit (cgroup 2)."""
    available = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
        if limit != "max":
            available = min(available, int(limit) - int(used) + (int(cached[1]) if cached else 0))
    except OSError:
        pass  # no such limit
    return available
