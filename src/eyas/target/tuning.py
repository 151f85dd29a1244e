"""What makes a transformers model fast on a CPU and changes its results by no more than rounding.

Two things. oneDNN multiplies a weight that already lies in its own blocked layout in half the time, or less, for the
few rows of a decoding step. And transformers' sdpa repeats keys and values for every query head of a group as soon as
there is a mask; with the heads of a group as rows, they are read once.

It is for models that Eyas loaded itself: somebody else's model keeps the classes and the configuration it came with.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "eyas_sdpa"  # the name of `grouped_attention` in a config

SMALLEST = 1 << 16  # elements; below, a call of oneDNN costs more than the layout saves
MARGIN = 2 << 30  # bytes of memory that packing must leave free, for the cache and everybody else
ROWS = 8  # what the layout is chosen for; it serves any number of rows
PACKED = "_eyas_packed"  # the attribute of a weight that holds its packed copy
OP = "eyas::packed_linear"


@dataclass(frozen=True)
class Tuning:
    """What ``tune`` did, and why not what it did not do."""

    packed: int  # linear layers that use a packed weight
    nbytes: int  # memory of the packed copies, those of an earlier call included
    attention: bool  # query heads are grouped
    reasons: tuple[str, ...] = ()  # one sentence for each thing left alone


def tune(model: Any, *, smallest: int = SMALLEST, margin: int = MARGIN) -> Tuning:
    """Packs the linear layers of ``model`` and groups its query heads, in place, where that is possible and pays.

    Parameters stay what and where they are, and may be replaced, moved, converted or written to later: a packed copy
    that is no longer that of its weight is not used. Only a write that PyTorch does not count (to ``weight.data``)
    goes unnoticed. Calling it again packs what has changed. ``smallest``: elements of a weight worth packing.
    """
    packed, nbytes, unpacked = pack_linears(model, smallest=smallest, margin=margin)
    ungrouped = _group_heads(model)
    return Tuning(packed, nbytes, ungrouped is None, tuple(reason for reason in (unpacked, ungrouped) if reason))


# Linear layers


class PackedLinear(nn.Linear):
    """A linear layer that multiplies by the packed copy of its weight while there is one and it is up to date."""

    def pack(self) -> None:
        """Makes the packed copy, unless one is up to date, or the weight has become one that cannot be packed."""
        if _packed_copy(self.weight) is None and packable(self, smallest=0):
            setattr(self.weight, PACKED, _Packed(self.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad):
            return F.linear(x, self.weight, self.bias)  # the packed product has no gradient
        if torch.compiler.is_compiling():
            return torch.ops.eyas.packed_linear(x, self.weight, self.bias)
        return _packed_linear(x, self.weight, self.bias)


def pack_linears(model: nn.Module, *, smallest: int = SMALLEST, margin: int = MARGIN) -> tuple[int, int, str | None]:
    """Makes the linear layers ``PackedLinear``: how many are, their bytes, and why not all or none of them are."""
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
    for layer in layers:
        layer.__class__ = PackedLinear
        layer.pack()
    return len(layers), sum(weight.nbytes for weight in _distinct(layers)), None


def packed_nbytes(model: nn.Module, *, smallest: int = SMALLEST) -> int:
    """The memory that packing ``model`` takes, beyond its weights and what is packed already."""
    weights = _distinct(_packable_layers(model, smallest))
    return sum(weight.nbytes for weight in weights if _packed_copy(weight) is None)


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


class _Packed:
    """A weight in oneDNN's layout, with what it was made from.

    It hangs on the weight itself: a compiled function is handed the model's weights, and finds it there.
    """

    __slots__ = ("identity", "matrix", "source")

    def __init__(self, weight: torch.Tensor):
        self.source = weight.detach()  # keeps the memory, so that its address cannot become that of other values
        self.identity = _identity(weight)
        self.matrix = torch.ops.mkldnn._reorder_linear_weight.default(self.source, ROWS)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # saved or copied with its weight, it is left out: the layout is this process's own


def _identity(weight: torch.Tensor) -> tuple[Any, ...]:
    return weight.data_ptr(), weight.dtype, weight.stride(), weight._version


def _packed_copy(weight: torch.Tensor) -> _Packed | None:
    """The packed copy of these very values; one of former values is dropped."""
    packed = getattr(weight, PACKED, None)
    if packed is None or weight.is_inference() or packed.identity != _identity(weight):
        if packed is not None:
            delattr(weight, PACKED)
        return None
    return packed


def _packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    packed = _packed_copy(weight)
    if packed is None or x.dtype != weight.dtype or not x.numel():
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise.default(x, packed.matrix, bias, "none", [], "")


def _packed_linear_shape(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _register() -> None:
    """The product as one operation of PyTorch's, so that a compiled graph calls it instead of looking inside.

    Under these low-level calls it costs a compiled graph next to nothing, and lives as long as the process.
    """
    if not hasattr(torch.ops.eyas, "packed_linear"):
        torch.library.define(OP, "(Tensor x, Tensor weight, Tensor? bias) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(OP, "CPU", _packed_linear)
        torch.library.impl(OP, "Meta", _packed_linear_shape)


_register()


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


# Attention


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' sdpa attention, with the query heads that share a key head as rows of one.

    query [B, heads, T, D]; key [B, groups, S, D]; value [B, groups, S, E]; attention_mask bool (True: seen) or additive
    [B or 1, 1, T or 1, S]; the result is [B, T, heads, E]. Whatever is different goes to transformers unchanged.
    """
    if not _groups(module, query, key, attention_mask) or dropout or any(map(_unusual, kwargs.items())):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    assert attention_mask is not None
    batch, heads, count, size = query.shape
    groups = key.shape[1]
    rows = query.reshape(batch, groups, heads // groups * count, size)  # the heads of a group are neighbours
    if attention_mask.shape[2] > 1:
        attention_mask = attention_mask.repeat(1, 1, heads // groups, 1)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, heads, count, value.shape[-1]).transpose(1, 2).contiguous(), None


def _groups(module: nn.Module, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether query heads share key heads on the CPU, under a mask that is the same for all heads."""
    if query.device.type != "cpu" or not isinstance(mask, torch.Tensor) or mask.dim() != 4:
        return False
    shared = getattr(module, "num_key_value_groups", 1)
    return (
        shared > 1
        and query.shape[1] == shared * key.shape[1]
        and query.shape[0] == key.shape[0]
        and mask.shape[0] in (1, query.shape[0])
        and mask.shape[1] == 1
        and mask.shape[2] in (1, query.shape[2])
        and mask.shape[3] == key.shape[2]
    )


USUAL = ("is_causal", "sliding_window", "position_ids", "cache_position", "use_cache", "output_hidden_states")


def _unusual(argument: tuple[str, Any]) -> bool:
    """An argument that might change the result. The usual ones do not: the mask says it all."""
    name, value = argument
    return name not in USUAL and value is not None and value is not False


def _group_heads(model: Any) -> str | None:
    """Makes the decoder of ``model`` use ``grouped_attention``; why it does not, otherwise."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if not isinstance(decoder, nn.Module):
        return "query heads are not grouped: no decoder was found"
    held = [getattr(module, "config", None) for module in decoder.modules()]
    text = model.config.get_text_config(decoder=True)
    configs = {id(c): c for c in (text, *held) if getattr(c, "_attn_implementation", None) in ("sdpa", ATTENTION)}
    if id(text) not in configs:
        return f"query heads are not grouped: the attention is {text._attn_implementation!r}, not 'sdpa'"
    if next(decoder.parameters()).device.type != "cpu":
        return "query heads are not grouped: the model is not on the CPU"
    if all(getattr(module, "num_key_value_groups", 1) == 1 for module in decoder.modules()):
        return "query heads are not grouped: each has keys of its own"
    if reason := _bound_to_sdpa(decoder):
        return f"query heads are not grouped: {reason}"
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, grouped_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    for config in configs.values():
        config._attn_implementation = ATTENTION
    return None


def _bound_to_sdpa(decoder: nn.Module) -> str | None:
    """Why another name than 'sdpa' would change what the decoder's own code does (Gemma 4, Falcon), by its source."""
    dispatches = False
    for name in sorted({type(module).__module__ for module in decoder.modules()}):
        if name.startswith("torch.") or name == __name__:
            continue
        try:
            source = inspect.getsource(sys.modules[name])
        except (OSError, TypeError, KeyError):
            return f"{name} has no source to look at"
        if re.search(r"""\b_attn_implementation\b.*["']sdpa["']""", source):
            return f"{name} asks for sdpa by its name"
        dispatches |= "ALL_ATTENTION_FUNCTIONS" in source
    return None if dispatches else f"{type(decoder).__name__} chooses its attention in its own way"
