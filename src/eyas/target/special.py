"""Named exceptions: models whose own code reads positions from the cache or keeps request state on the model object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from eyas.core import TargetError


@contextmanager
def llama4_wrapper(model: Any) -> Iterator[None]:
    """Lets Llama 4's multimodal wrapper run in transformers 5.24.0.

    There it reads ``image_outputs`` from its language model's output, which has no such field.
    """

    def give(_module: nn.Module, _args: Any, output: Any) -> None:
        if not hasattr(output, "image_outputs"):
            output.image_outputs = None

    if type(model).__name__ != "Llama4ForConditionalGeneration":
        yield
        return
    handle = model.language_model.register_forward_hook(give)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def llama4_temperature(layers: list[nn.Module], places: torch.Tensor) -> Iterator[None]:
    """Llama 4 scales the queries of its NoPE layers by their position, which it takes from cache length and row index.

    In a tree the row index is not the position, so the model's own scaling is switched off for one forward pass and
    applied to the output of ``q_proj`` (nothing lies between the two on these layers) from ``places`` [B, T].
    """
    handles, tuned = [], _tuned(layers)
    for attention in tuned:
        scale = torch.log1p(torch.floor((places.float() + 1.0) / attention.floor_scale)) * attention.attn_scale + 1.0

        def rescale(_module: nn.Module, _args: Any, output: torch.Tensor, scale: torch.Tensor = scale) -> torch.Tensor:
            return (output * scale[..., None]).to(output.dtype)

        handles.append(attention.q_proj.register_forward_hook(rescale))
        attention.attn_temperature_tuning = False
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for attention in tuned:
            attention.attn_temperature_tuning = True


def _tuned(layers: list[nn.Module]) -> list[Any]:
    attentions: list[Any] = [getattr(layer, "self_attn", None) for layer in layers]
    return [
        attention
        for attention in attentions
        if type(attention).__name__ == "Llama4TextAttention"
        and attention.attn_temperature_tuning
        and not attention.use_rope
    ]


def needs_help(model: Any, layers: list[nn.Module]) -> bool:
    """Whether one of the exceptions above applies to every pass of this model."""
    return type(model).__name__ == "Llama4ForConditionalGeneration" or bool(_tuned(layers))


def rope_delta(model: nn.Module, images: Mapping[str, Any], count: int) -> int:
    """What a prompt of ``count`` tokens with images, just read, did to the positions of the tokens behind it."""
    delta, positions = take_rope_delta(model), images.get("position_ids")
    if positions is None:
        return delta
    return int(positions[-3:].max()) + 1 - count  # of three axes; a fourth, in front, counts tokens


def take_rope_delta(model: nn.Module) -> int:
    """The Qwen-VL and GLM-V families leave the position offset behind an image on the model object (``rope_deltas``).

    Takes it away, so that it cannot leak into another request, and returns it; 0 for models without.
    """
    delta = 0
    for module in model.modules():
        if isinstance(deltas := getattr(module, "rope_deltas", None), torch.Tensor):
            delta = int(deltas.flatten()[0])
            setattr(module, "rope_deltas", None)  # noqa: B010 (nn.Module's stub takes no None by plain assignment)
    return delta


def refuse_gpt_neo(model: Any) -> None:
    """GPT-Neo's local layers keep their window as a buffer over rows of the cache; in a tree, rows are not places."""
    if "local" in (getattr(model.config, "attention_layers", None) or ()):
        raise TargetError(
            f"{type(model).__name__} applies the window of its local layers to rows of the cache instead of positions, "
            "so it cannot verify a tree of draft tokens."
        )
