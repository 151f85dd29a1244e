"""What makes a transformers model fast on a CPU and changes its results by no more than rounding.

Two things. oneDNN multiplies a weight that already lies in its own blocked layout in half the time, or less, for the
few rows of a decoding step (``packing``). And transformers' sdpa repeats keys and values for every query head of a
group as soon as there is a mask; with the heads of a group as rows, they are read once. For the few rows of a decoding
step a kernel of ours does that, at the speed of memory (``attention``).

It is for models that Eyas loaded itself: somebody else's model keeps the classes and the configuration it came with.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eyas.target import attention
from eyas.target.packing import MARGIN, SMALLEST, find_families, pack_linears

logger = logging.getLogger(__name__)

ATTENTION = "eyas_sdpa"  # the name of `grouped_attention` in a config
FEW = 64  # query rows that share keys: with more, the products are worth PyTorch's


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
    packed, nbytes, unpacked = _pack(model, smallest, margin)
    ungrouped = _group_heads(model)
    slow = attention.prepare() if ungrouped is None else None  # compiled now, the first time on a machine
    for level, reason in (logging.INFO, unpacked), (logging.INFO, ungrouped), (logging.WARNING, slow):
        if reason:
            logger.log(level, "Decoding is slower than it could be: %s.", reason)
    return Tuning(packed, nbytes, ungrouped is None, tuple(r for r in (unpacked, ungrouped, slow) if r))


@torch.no_grad()
def _pack(model: Any, smallest: int, margin: int) -> tuple[int, int, str | None]:
    """Packs the linear layers; those that read the same input together, if the model computes the same with that.

    What reads the same is seen on a few tokens.
    """
    before: list[torch.Tensor] = []
    try:
        families = find_families(model, lambda: before.append(_few_logits(model)), smallest=smallest)
    except Exception as error:  # whatever it is that this model wants beside tokens
        done = pack_linears(model, smallest=smallest, margin=margin)
        return _explained(done, f"the model does not run on tokens alone: {error}")
    done = pack_linears(model, smallest=smallest, margin=margin, families=families)
    if not families or not done[0] or (reason := _changed(model, before[0])) is None:
        return done
    alone = [[layer] for family in families for layer in family]
    return _explained(pack_linears(model, smallest=smallest, margin=margin, families=alone), reason)


def _few_logits(model: Any) -> torch.Tensor:
    return model(input_ids=torch.arange(3)[None], use_cache=False).logits.float()


def _changed(model: Any, before: torch.Tensor) -> str | None:
    """Why the model cannot do with parts of wider results: it fails, or computes something else than before."""
    try:
        after = _few_logits(model)
    except Exception as error:
        return f"the model fails with parts of one product: {error}"
    alike = torch.allclose(after, before, rtol=0.1, atol=0.1 * float(before.std()))
    return None if alike else "the model computes something else with parts of one product"


def _explained(done: tuple[int, int, str | None], reason: str) -> tuple[int, int, str | None]:
    packed, nbytes, unpacked = done
    return packed, nbytes, unpacked or f"layers that read the same are multiplied one by one: {reason}"


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
    """transformers' sdpa attention, with the query heads that share a key head as rows of one; few rows by our kernel.

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
    if heads // groups * count <= FEW and attention.supported(query, key, value, attention_mask):
        return attention.ATTENTION(query, key, value, attention_mask, scaling), None
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
