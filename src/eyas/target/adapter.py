"""Any transformers causal LM or multimodal wrapper behind the Eagle3Target contract."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from eyas.core import EyasError, TargetError, UsageError
from eyas.target import special
from eyas.target.cache import LayerShape, ProbeCache, SlotCache, StepCache
from eyas.target.compiling import ANY, SOME, Step, any_length, compiled
from eyas.target.contract import Block, TargetOutput
from eyas.target.masks import MaskKinds
from eyas.target.packing import PackedLinear

LAYER_LISTS = ("layers", "h", "blocks", "block")
RECURRENT_LAYERS = ("linear_attention", "mamba", "conv", "hybrid")
IMAGE_TOKENS = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "media_placeholder_token_id",
)
INNER_MODELS = ("language_model", "text_model", "model", "transformer", "decoder", "thinker", "llm", "gpt_neox")
HEAD = -1  # the output head among the hooks, which are kept by layer


@dataclass
class Noted:
    """What the hooks are for while a forward pass of ours runs; nothing in passes that others make with the model."""

    states: dict[int, torch.Tensor] | None = None  # by layer
    ends: torch.Tensor | None = None  # int64 [B], the places whose logits are wanted


def remove(hooks: dict[int, RemovableHandle]) -> None:
    while hooks:
        hooks.popitem()[1].remove()


class HFTarget:
    """An unmodified transformers model as an EAGLE-3 target.

    Raises TargetError at construction when the model cannot be one: no findable decoder layers, embedding or head,
    state that cannot be rolled back, or a forward pass that does not honour tree masks and positions (tried on a few
    tokens).
    """

    def __init__(self, model: Any):
        refuse_stateful(model)
        special.refuse_gpt_neo(model)
        self.model = model
        self.layers = find_layers(model)
        self._embed = find_embed(model)
        self._head = find_head(model)
        self.config = model.config.get_text_config(decoder=True)
        self.num_layers = len(self.layers)
        self.vocab_size, self.hidden_size = self._head.weight.shape
        self.context_length = context_length(self.config)
        self.device = self._embed.weight.device
        self.dtype = self._embed.weight.dtype
        # of tokens drafted beyond the context's end, which are never emitted: a table of positions ends there
        self._last_position = (getattr(self.config, "max_position_embeddings", None) or 1 << 30) - 1
        self._masks = MaskKinds.from_config(self.config)
        self._cache_name = cache_argument(model)
        self._layer_ids: tuple[int, ...] = ()
        self._noted = Noted()
        self._compiled: dict[tuple[int, int, tuple[int, ...]], Step] = {}  # by sequences, tokens (ANY), captured layers
        self._hooks: dict[int, RemovableHandle] = {}
        weakref.finalize(self, remove, self._hooks)  # the model may live on
        self._shapes = self._probe()
        self._self_check()

    # The contract, in the field's names

    def set_eagle3_layers_to_capture(self, layer_ids: Sequence[int] | None) -> None:
        """Which states ``forward`` returns, as entry ids 0..n; None: none. Raises UsageError for ids out of range."""
        ids = tuple(layer_ids or ())
        if ids == self._layer_ids and self._hooks:
            return
        for layer in ids:
            if not 0 <= layer <= self.num_layers:
                raise UsageError(
                    f"Cannot capture the state entering layer {layer}: this target has {self.num_layers} layers, "
                    f"so entry ids go from 0 to {self.num_layers} ({self.num_layers} is the last layer's output)."
                )
        self._layer_ids = ids
        for layer in {*ids, 0} - set(self._hooks):  # always the embeddings too: images need them
            self._hooks[layer] = self._hook(layer)
        if HEAD not in self._hooks:
            self._hooks[HEAD] = self._hook_head()

    def get_embed_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(input embedding [V, H], output head [V, H]): the weights themselves, not copies."""
        return self._embed.weight, self._head.weight

    def set_embed_and_head(self, embed: torch.Tensor, head: torch.Tensor) -> None:
        """Replaces both weights. Raises UsageError, and replaces neither, when a shape differs from what is there."""
        pairs = ("embedding", self._embed, embed), ("head", self._head, head)
        for name, module, new in pairs:
            if module.weight.shape != new.shape:
                raise UsageError(f"The {name} is {tuple(module.weight.shape)}, got {tuple(new.shape)}.")
        for _, module, new in pairs:
            module.weight = nn.Parameter(new.to(module.weight), requires_grad=False)
            if isinstance(module, PackedLinear):
                module.pack()
        self._compiled.clear()  # made for the old weights

    def new_cache(self, rows: int) -> SlotCache:
        return SlotCache(self._shapes, rows)

    @property
    def row_nbytes(self) -> int:
        """Keys and values of one token, in all layers."""
        return sum(shape.nbytes for shape in self._shapes.values())

    @torch.no_grad()
    def forward(
        self,
        block: Block,
        cache: SlotCache,
        *,
        ends: torch.Tensor | None = None,
        images: Mapping[str, Any] | None = None,
    ) -> TargetOutput:
        """One pass over ``block``; its keys and values are in ``cache`` afterwards.

        ``ends`` int64 [B]: logits at these places only, one in each row. ``images`` (for a block at the start of a
        single slot) are a processor's tensors, or what ``generate`` makes of them (encoder outputs and positions).
        """
        batch, count = block.tokens.shape
        if images:
            return self._with_images(block, cache, images, ends)
        views = cache.views(block.slot, batch, cache.length)  # whole slots: compiled code is made for such
        depths = torch.arange(count, device=block.starts.device) if block.depths is None else block.depths
        places = block.starts[:, None] + depths
        positions = places.clamp(max=self._last_position)  # before the deltas: behind a video they count further
        positions = positions if block.rope_deltas is None else positions + block.rope_deltas[:, None]
        masks = self._masks.build(block, self.dtype)
        wanted = () if ends is None or count == 1 else (ends,)
        if (step := self._compiled.get((batch, ANY if wanted else count, self._layer_ids))) is not None:
            return TargetOutput(*step(block.tokens, positions, masks, block.starts, views, *wanted))
        with special.llama4_temperature(self.layers, places), special.llama4_wrapper(self.model):
            return TargetOutput(*self._step(block.tokens, positions, masks, block.starts, views, ends))

    def _step(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        masks: torch.Tensor | dict[str, torch.Tensor],
        starts: torch.Tensor,
        views: dict[int, tuple[torch.Tensor, torch.Tensor]],
        ends: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits and captured states: tensors in, tensors out, so that it can be compiled."""
        mask = list(masks.values())[0] if isinstance(masks, dict) else masks  # noqa: RUF015 (the compiler knows lists)
        length = mask.shape[-1]
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "position_ids": positions,
            "attention_mask": masks,
            self._cache_name: StepCache(views, starts, length),
            "use_cache": True,
        }
        logits, captured = self._run(inputs, ends)
        states = torch.cat([captured[i] for i in self._layer_ids], dim=-1) if self._layer_ids else None
        return logits, states

    def _with_images(
        self, block: Block, cache: SlotCache, images: Mapping[str, Any], ends: torch.Tensor | None
    ) -> TargetOutput:
        """The model works out its own masks (image blocks) and multi-axis positions, or they come with the images."""
        count = block.tokens.shape[1]
        if len(block.tokens) > 1 or block.ancestors is not None or int(block.starts[0]) > 0:
            raise ValueError("images go with the first block of a single, empty slot")
        inputs = {
            "input_ids": block.tokens,
            self._cache_name: StepCache(cache.views(block.slot, 1, count), block.starts),
            "use_cache": True,
            **self._placed(images),
        }
        special.take_rope_delta(self.model)  # one that somebody else left behind would be taken for this image's
        places = torch.arange(count, device=block.starts.device)[None]
        with special.llama4_temperature(self.layers, places), special.llama4_wrapper(self.model):
            logits, captured = self._run(inputs, ends)
        states = torch.cat([captured[i] for i in self._layer_ids], dim=-1) if self._layer_ids else None
        delta = special.rope_delta(self.model, images, count)
        return TargetOutput(logits, states, captured[0], delta)

    @property
    def compilable(self) -> bool:
        """Whether steps can be compiled: models that need something done around every pass cannot be."""
        return not special.needs_help(self.model, self.layers)

    @torch.inference_mode()
    def compile(self, sequences: int, tokens: int | None) -> None:
        """Has ``forward`` run blocks of this size compiled from now on, capturing the layers it captures now.

        ``tokens`` None: blocks of any number of tokens of which only the logits at ``ends`` are wanted. Takes a minute
        or two the first time on a machine, and seconds when torch finds its work in its cache.
        """
        size = (sequences, tokens or ANY, self._layer_ids)
        if size in self._compiled:
            return
        reads, tokens = tokens is None, tokens or SOME
        length = max(tokens, 64)
        with torch.inference_mode(False):  # as an engine's cache is; the compiler tells the two kinds apart
            cache = self.new_cache(sequences * 2 * length)
            cache.layout(sequences, 2 * length)  # longer than what is read: as one size, the two would be taken for one
        views = cache.views(0, sequences, cache.length)
        starts = torch.zeros(sequences, dtype=torch.long, device=self.device)
        ids = torch.zeros(sequences, tokens, dtype=torch.long, device=self.device)
        positions = (starts[:, None] + torch.arange(tokens, device=self.device)).clamp(max=self._last_position)
        masks = self._masks.build(Block(ids, 0, starts, length), self.dtype)
        kinds = list(masks.values()) if isinstance(masks, dict) else [masks]
        any_length((part for pair in views.values() for part in pair), dim=2)
        any_length(kinds, dim=3)
        if reads:
            any_length(kinds, dim=2)
            any_length([ids, positions], dim=1)
        gc.collect()  # another target of the same model that is garbage would take its hooks away while this is traced
        step = compiled(type(self)._step, self)
        # one tensor twice would be compiled as one argument
        step(ids, positions, masks, starts, views, *([starts.clone()] if reads else []))
        self._compiled[size] = step

    def image_positions(self, tokens: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """Bool [B, T]: where ``embeds`` (what entered layer 0) stands for a piece of an image.

        By the placeholder ids the config names; where it names none, by not being the token's own embedding.
        """
        ids = [getattr(self.model.config, name, None) for name in IMAGE_TOKENS]
        if known := [i for i in ids if isinstance(i, int)]:
            return torch.isin(tokens, torch.tensor(known, device=tokens.device))
        own = self._embed(tokens.clamp(max=self._embed.weight.shape[0] - 1))
        return (own != embeds).any(-1)

    # How it is done

    def _placed(self, images: Mapping[str, Any]) -> dict[str, Any]:
        """A processor's tensors (float32, on the CPU) as the model takes them."""
        tensors = {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in images.items()}
        pixels = {k: v.to(self.dtype) for k, v in tensors.items() if k.startswith("pixel_values")}
        return tensors | pixels

    def _hook(self, layer: int) -> RemovableHandle:
        """Notes the state entering a layer during a forward pass of ours; id n leaves the last layer."""

        noted = self._noted

        def entering(_module: nn.Module, args: tuple, kwargs: dict) -> None:
            if noted.states is not None:
                noted.states[layer] = args[0] if args else kwargs["hidden_states"]

        def leaving(_module: nn.Module, _args: tuple, output: Any) -> None:
            if noted.states is not None:
                noted.states[layer] = output[0] if isinstance(output, tuple) else output

        if layer < self.num_layers:
            return self.layers[layer].register_forward_pre_hook(entering, with_kwargs=True)
        return self.layers[-1].register_forward_hook(leaving)

    def _hook_head(self) -> RemovableHandle:
        """Has the output head see no more than the places whose logits are wanted.

        What the model does to its logits behind the head (a soft-cap, a scale) is done to those.
        """
        noted = self._noted

        def entering(_module: nn.Module, args: tuple) -> tuple | None:
            if noted.ends is None or not args or args[0].dim() != 3:
                return None
            return (at_ends(args[0], noted.ends), *args[1:])

        return self._head.register_forward_pre_hook(entering)

    def _run(
        self, inputs: dict[str, Any], ends: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Logits and the states that the hooks noted. Raises TargetError for a layer that did not run."""
        captured: dict[int, torch.Tensor] = {}
        self._noted.states, self._noted.ends = captured, ends
        try:
            logits = self.model(**inputs).logits
        finally:
            self._noted.states = self._noted.ends = None
        if skipped := [layer for layer in self._layer_ids if layer not in captured]:
            raise TargetError(
                f"{type(self.model).__name__} did not run layers {skipped} of the {self.num_layers} it has."
            )
        if ends is not None and logits.shape[1] > 1:  # a model that does not call its head, but uses its weight
            logits = at_ends(logits, ends)
        return logits, captured

    def _probe(self) -> dict[int, LayerShape]:
        cache = ProbeCache()
        token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with (
            torch.no_grad(),
            special.llama4_wrapper(self.model),
            self._explained("does not run on token ids, positions and a cache alone"),
        ):
            self._run({"input_ids": token, "position_ids": token, "use_cache": True, self._cache_name: cache})
        if not cache.shapes:
            raise TargetError(f"{type(self.model).__name__} wrote no keys and values to the cache it was given.")
        return cache.shapes

    def _self_check(self) -> None:
        """Raises TargetError unless the model gives its states, and decodes a tree as it reads a line by itself."""
        name, every = type(self.model).__name__, range(self.num_layers + 1)
        self.set_eagle3_layers_to_capture(every)
        try:
            with self._explained("does not take a tree mask with positions of its own"), self._small_windows():
                line, tree = self._line_and_tree()
        finally:
            remove(self._hooks)
        if not bool(line.isfinite().all()):
            raise TargetError(
                f"{name} computes NaN or infinite logits: its weights are damaged, or {self.dtype} overflows."
            )
        off = (tree - line).square().mean(-1).sqrt().max() / line.std().clamp(min=1e-6)
        allowed = 1e-3 if self.dtype in (torch.float32, torch.float64) else 0.3
        if not off <= allowed:
            raise TargetError(
                f"{name} does not decode a tree as it reads a line (its logits differ by {off:.2g} of their spread, "
                f"{allowed} is allowed): it ignores the mask or the positions it is given, or uses them differently"
                + (" (or it drops out: it is in training mode, call its eval())." if self.model.training else ".")
            )
        self.set_eagle3_layers_to_capture(None)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Whatever a model raises on being tried out says that it cannot be a target."""
        try:
            yield
        except EyasError:
            raise
        except Exception as error:
            raise TargetError(f"{type(self.model).__name__} {what}: {type(error).__name__}: {error}") from error

    def _line_and_tree(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of six tokens, twice: left to the model alone, and from a prefix, a tree and a token after it."""
        a, b, c, d, e, f, x = (i % self.vocab_size for i in (3, 7, 11, 5, 13, 17, 19))
        cache = self.new_cache(8)

        def run(
            tokens: list[int],
            start: int,
            tree: tuple[list[int], list[list[int]]] | None = None,
            ends: list[int] | None = None,
        ) -> torch.Tensor:
            depths, ancestors = (torch.tensor([part], device=self.device) for part in tree) if tree else (None, None)
            ids, starts = (torch.tensor(x, device=self.device) for x in ([tokens], [start]))
            block = Block(ids, 0, starts, start + len(tokens), depths=depths, ancestors=ancestors)
            out = self.forward(block, cache, ends=None if ends is None else torch.tensor(ends, device=self.device))
            self._check_states(out.states)
            return out.logits[0].float()

        with torch.no_grad(), special.llama4_wrapper(self.model):
            ids = torch.tensor([[a, b, c, d, e, f]], device=self.device)
            line, _ = self._run({"input_ids": ids, "use_cache": False})
        prefix = run([a, b, c], 0)
        prefix[1] = run([a, b, c], 0, ends=[1])
        tree = run([d, x, e], 3, ([0, 1, 1], [[True, False, False], [True, True, False], [True, False, True]]))
        cache.keep(0, *(torch.tensor(x, device=self.device) for x in ([3], [[0, 2]])))
        return line[0].float(), torch.cat([prefix, tree[[0, 2]], run([f], 5)])

    def _check_states(self, states: torch.Tensor | None) -> None:
        assert states is not None
        expected = len(self._layer_ids) * self.hidden_size
        if states.dim() != 3 or states.shape[-1] != expected:
            raise TargetError(
                f"{type(self.model).__name__} carries states of shape {tuple(states.shape)} between layers, expected "
                f"[batch, tokens, {expected}]: more than one stream cannot feed a drafter."
            )

    @contextmanager
    def _small_windows(self) -> Iterator[None]:
        """Windows and chunks of three tokens, so that a few tokens show whether masks reach the layers they are for."""
        names = [n for n in ("sliding_window", "attention_chunk_size") if getattr(self.config, n, None)]
        sizes, masks = {n: getattr(self.config, n) for n in names}, self._masks
        try:
            for name in names:
                setattr(self.config, name, 3)
            self._masks = MaskKinds.from_config(self.config)
            yield
        finally:
            for name, size in sizes.items():
                setattr(self.config, name, size)
            self._masks = masks


def context_length(config: Any) -> int | None:
    """How many tokens a sequence may have, by the text config.

    longrope and dynamic RoPE choose their frequencies by the longest position of a pass, so beyond the length they were
    trained for a draft would change what is before it: there, plain and speculative decoding cannot agree.
    """
    length: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    for kind in kinds:
        if kind.get("rope_type", kind.get("type")) in ("longrope", "dynamic") and length is not None:
            original = kind.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            length = min(length, original or length)
    return length


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


def at_ends(values: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[B, 1, X] of [B, T, X]: the place in each row that ``ends`` int64 [B] names."""
    return values[torch.arange(len(values), device=values.device), ends][:, None]


def cache_argument(model: Any) -> str:
    """The name ``forward`` gives its cache: transformers renamed it."""
    names = inspect.signature(model.forward).parameters
    cache = next((n for n in ("cache", "past_key_values") if n in names), None)
    if cache is None or "position_ids" not in names:
        raise TargetError(
            f"{type(model).__name__}.forward takes no {'position_ids' if cache else 'cache'}, "
            "so it cannot verify a tree of draft tokens."
        )
    return cache
