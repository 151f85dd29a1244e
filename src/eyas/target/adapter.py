"""Any transformers causal LM or multimodal wrapper behind the Eagle3Target contract."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from eyas.core import TargetError, UsageError
from eyas.target import special
from eyas.target.cache import LayerShape, ProbeCache, SlotCache
from eyas.target.contract import Block, TargetOutput
from eyas.target.masks import MaskKinds

LAYER_LISTS = ("layers", "h", "blocks", "block")
RECURRENT_LAYERS = ("linear_attention", "mamba", "conv", "hybrid")
INNER_MODELS = ("language_model", "text_model", "model", "transformer", "decoder", "thinker", "llm", "gpt_neox")


class HFTarget:
    """An unmodified transformers model as an EAGLE-3 target.

    Raises TargetError at construction when the model cannot be one: no findable decoder layers, embedding or head,
    state that cannot be rolled back, or a forward pass that does not honour tree masks and positions (tried on a few
    tokens).
    """

    def __init__(self, model: Any):
        refuse_stateful(model)
        self.model = model
        self.layers = find_layers(model)
        self._embed = find_embed(model)
        self._head = find_head(model)
        self.config = model.config.get_text_config(decoder=True)
        self.num_layers = len(self.layers)
        self.vocab_size, self.hidden_size = self._head.weight.shape
        self.context_length: int | None = getattr(self.config, "max_position_embeddings", None)
        self.device = self._embed.weight.device
        self.dtype = self._embed.weight.dtype
        self._masks = MaskKinds.from_config(self.config)
        self._cache_name, self._takes_logits_to_keep = forward_signature(model)
        self._layer_ids: tuple[int, ...] = ()
        self._hooks: list[Any] = []
        self._captured: dict[int, torch.Tensor] | None = None  # filled by the hooks during our own forward only
        self._shapes = self._probe()
        self._self_check()

    # The contract, in the field's names

    def set_eagle3_layers_to_capture(self, layer_ids: Sequence[int] | None) -> None:
        """Which states ``forward`` returns, as entry ids 0..n; None: none. Raises UsageError for ids out of range."""
        ids = tuple(layer_ids or ())
        for layer in ids:
            if not 0 <= layer <= self.num_layers:
                raise UsageError(
                    f"Cannot capture the state entering layer {layer}: this target has {self.num_layers} layers, "
                    f"so entry ids go from 0 to {self.num_layers} ({self.num_layers} is the last layer's output)."
                )
        for handle in self._hooks:
            handle.remove()
        self._layer_ids = ids
        self._hooks = [self._hook(layer) for layer in {*ids, 0}]  # 0 also serves the embeddings of images

    def get_embed_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(input embedding [V, H], output head [V, H]): the weights themselves, not copies."""
        return self._embed.weight, self._head.weight

    def set_embed_and_head(self, embed: torch.Tensor, head: torch.Tensor) -> None:
        """Replaces both weights. Raises UsageError when a shape differs from what is there."""
        for name, module, new in (("embedding", self._embed, embed), ("head", self._head, head)):
            if module.weight.shape != new.shape:
                raise UsageError(f"The {name} is {tuple(module.weight.shape)}, got {tuple(new.shape)}.")
            module.weight = nn.Parameter(new, requires_grad=False)

    def new_cache(self, slots: int, length: int) -> SlotCache:
        return SlotCache(self._shapes, slots, length)

    @torch.no_grad()
    def forward(
        self, block: Block, cache: SlotCache, *, last_only: bool = False, images: Mapping[str, Any] | None = None
    ) -> TargetOutput:
        """One pass over ``block``; its keys and values are in ``cache`` afterwards. ``images`` needs an empty slot."""
        count = block.tokens.shape[1]
        cache.begin(block.slots, block.starts, count)
        fresh = block.starts == (0,) and block.ancestors is None
        if images and not fresh:
            raise ValueError("images go with the first block of a single, empty slot")
        starts = torch.tensor(block.starts, device=block.tokens.device)[:, None]
        depths = torch.arange(count, device=starts.device) if block.depths is None else block.depths
        places = starts + depths
        inputs: dict[str, Any] = {"input_ids": block.tokens, self._cache_name: cache, "use_cache": True}
        inputs |= images or {}
        if not images:  # with images, the model works out its own (multi-axis) positions
            inputs["position_ids"] = places + torch.tensor(block.rope_deltas, device=starts.device)[:, None]
        if not fresh:  # at the start of a slot the model builds its own masks, image blocks included
            inputs["attention_mask"] = self._masks.build(block, self.dtype)
        if self._takes_logits_to_keep:
            inputs["logits_to_keep"] = 1 if last_only else 0

        captured: dict[int, torch.Tensor] = {}
        self._captured = captured
        try:
            with special.llama4_temperature(self.layers, places):
                logits = self.model(**inputs).logits
        finally:
            self._captured = None
        return TargetOutput(
            logits=logits[:, -1:] if last_only else logits,
            states=torch.cat([captured[i] for i in self._layer_ids], dim=-1) if self._layer_ids else None,
            embeds=captured.get(0) if images else None,
            rope_delta=special.take_rope_delta(self.model) if images else 0,
        )

    def image_positions(self, tokens: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """Bool [B, T]: where ``embeds`` (what entered layer 0) is not the token's own embedding but an image's."""
        own = self._embed(tokens.clamp(max=self._embed.weight.shape[0] - 1))
        return (own != embeds).any(-1)

    # How it is done

    def _hook(self, layer: int) -> Any:
        """Records the state entering ``layer``; for the last id, the state leaving the last layer, before the norm."""

        def entering(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            if self._captured is not None:
                self._record(layer, args[0] if args else kwargs["hidden_states"])

        def leaving(_module: nn.Module, _args: tuple, output: Any) -> None:
            if self._captured is not None:
                self._record(layer, output[0] if isinstance(output, tuple) else output)

        if layer < self.num_layers:
            return self.layers[layer].register_forward_pre_hook(entering, with_kwargs=True)
        return self.layers[-1].register_forward_hook(leaving)

    def _record(self, layer: int, state: torch.Tensor) -> None:
        if state.dim() != 3 or state.shape[-1] != self.hidden_size:
            raise TargetError(
                f"The state at layer {layer} has shape {tuple(state.shape)}, expected [batch, tokens, "
                f"{self.hidden_size}]: {type(self.model).__name__} carries more than one stream between layers and "
                "cannot feed a drafter."
            )
        assert self._captured is not None
        self._captured[layer] = state

    def _probe(self) -> dict[int, LayerShape]:
        cache = ProbeCache()
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        try:
            with torch.no_grad():
                self.model(input_ids=token, position_ids=token, use_cache=True, **{self._cache_name: cache})
        except (TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise TargetError(
                f"{type(self.model).__name__} does not run on token ids, positions and a cache alone: {error}"
            ) from error
        if not cache.shapes:
            raise TargetError(f"{type(self.model).__name__} wrote no keys and values to the cache it was given.")
        return cache.shapes

    def _self_check(self) -> None:
        """A plain and a tree pass over the same few tokens must agree, before and after keeping the tree's path."""
        a, b, c, d, x = (i % self.vocab_size for i in (3, 7, 11, 5, 13))
        cache = self.new_cache(1, 8)

        def block(tokens: list[int], start: int, tree: list[list[int]] | None, depths: list[int]) -> Block:
            ids, place = (torch.tensor([t], device=self.device) for t in (tokens, depths))
            mask = None if tree is None else torch.tensor([tree], device=self.device, dtype=torch.bool)
            return Block(ids, (0,), (start,), (0,), place, mask)

        plain = self.forward(block([a, b, c, d], 0, None, [0, 1, 2, 3]), cache).logits[0].float()
        self.forward(block([a], 0, None, [0]), cache)
        tree = self.forward(block([b, x, c], 1, [[1, 0, 0], [0, 1, 0], [1, 0, 1]], [0, 0, 1]), cache).logits[0].float()
        cache.keep(0, 1, [0, 2])
        after = self.forward(block([d], 3, [[1]], [0]), cache).logits[0].float()
        off = (torch.stack([tree[0], tree[2], after[0]]) - plain[1:]).abs().max()
        allowed = (2e-3 if self.dtype in (torch.float32, torch.float64) else 0.3) * plain.std().clamp(min=1e-6)
        if not off <= allowed:
            raise TargetError(
                f"{type(self.model).__name__} does not decode a tree as it decodes a line (logits differ by {off:.3g}, "
                f"allowed {allowed:.3g}): its attention ignores the mask or the positions it is given."
            )


def nested(start: Any) -> Iterator[tuple[str, Any]]:
    """The module itself, then the models inside it by the usual attribute names, breadth first, with where each was."""
    queue: list[tuple[str, Any]] = [("the model", start)]
    while queue:
        where, module = queue.pop(0)
        yield where, module
        inner = [(name, getattr(module, name, None)) for name in INNER_MODELS]
        queue += [(f"{where}.{name}", m) for name, m in inner if isinstance(m, nn.Module)]


def refuse_stateful(model: Any) -> None:
    """Raises TargetError for encoder-decoders and for models with recurrent or linear-attention state."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise TargetError(f"{name} is an encoder-decoder; EAGLE-3 needs a decoder-only target.")
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    recurrent = [t for t in types if t in RECURRENT_LAYERS]
    stateful = [type(m).__name__ for _, m in nested(model) if getattr(m, "_is_stateful", False)]
    if recurrent or stateful:
        why = f"{len(recurrent)} layers of kind {recurrent[0]}" if recurrent else f"{stateful[0]}._is_stateful"
        raise TargetError(
            f"{name} keeps a recurrent state ({why}) that cannot be rolled back when draft tokens are rejected: "
            "it cannot be a target."
        )


def find_layers(model: Any) -> list[nn.Module]:
    """The decoder's layers, through ``get_decoder`` and nested language models; TargetError says where it looked."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    looked = []
    for root, start in (("get_decoder()", decoder), ("", model)):
        for where, module in nested(start) if start is not None else ():
            for name in LAYER_LISTS:
                if isinstance(found := getattr(module, name, None), nn.ModuleList) and len(found):
                    return list(found)
            looked.append(f"{where.replace('the model', root or 'the model')} ({type(module).__name__})")
    raise TargetError(
        f"No decoder layers found in {type(model).__name__}: looked for a ModuleList named "
        f"{', '.join(LAYER_LISTS)} on {'; '.join(looked)}."
    )


def find_embed(model: Any) -> Any:
    module = model.get_input_embeddings()
    if not isinstance(getattr(module, "weight", None), torch.Tensor):
        raise TargetError(
            f"{type(model).__name__}.get_input_embeddings() gave {type(module).__name__}, "
            "expected an embedding with a weight."
        )
    return module


def find_head(model: Any) -> Any:
    """The output head, on the model or on a language model nested in it; TargetError says where it looked."""
    looked = []
    for where, module in nested(model):
        if hasattr(module, "get_output_embeddings"):
            if (head := module.get_output_embeddings()) is not None:
                return head
            looked.append(f"{where} ({type(module).__name__})")
    raise TargetError(
        f"No output head found in {type(model).__name__}: get_output_embeddings() gave None on {'; '.join(looked)}. "
        "Load the ForCausalLM or ForConditionalGeneration class, not the bare model."
    )


def forward_signature(model: Any) -> tuple[str, bool]:
    """(the name ``forward`` gives its cache, whether it takes ``logits_to_keep``); transformers renamed the first."""
    names = inspect.signature(model.forward).parameters
    cache = next((n for n in ("cache", "past_key_values") if n in names), None)
    if cache is None or "position_ids" not in names:
        raise TargetError(
            f"{type(model).__name__}.forward takes no {'position_ids' if cache else 'cache'}, "
            "so it cannot verify a tree of draft tokens."
        )
    return cache, "logits_to_keep" in names
