"""From config.json to what a forward reads and computes: weights, experts, attention. No weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eyas.bench.quantization import PLAIN, Format, Quantization, read_quantization
from eyas.bridges.target import Target, open_target
from eyas.core import CheckpointError, TargetError, UsageError
from eyas.drafter import dialects
from eyas.drafter.checkpoint import NO_CONFIG, Checkpoint
from eyas.drafter.config import Eagle3Config
from eyas.files import read_json

# Kernels of a layer as SGLang and vLLM launch them, each norm fused with the addition before it.
ATTENTION_KERNELS = 7  # norm, q/k/v, rotary and cache write, attention, its combination, output, norm
MLA_KERNELS = 4  # norms and second projections of queries and keys, absorbed matrices before and after attention
MLP_KERNELS = 3  # gate and up, activation, down
ROUTING_KERNELS = 5  # router, top-k, two to sort tokens by expert, weighted sum
OUTER_KERNELS = 4  # embedding, final norm, head, choice of a token

_UNGATED = ("gpt2", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2", "gpt_bigcode", "nemotron")
_FULL, _WINDOWED = ("full_attention",), ("sliding_attention", "chunked_attention")
_ALL_WINDOWED = ("llama", "mistral", "mixtral", "phi3", "starcoder2")  # types whose window is that of every layer
_PERIODS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}  # every so many layers one sees everything
_OTHER_ATTENTION = ("index_topk", "compress_ratios", "linear_num_value_heads", "mamba_d_state", "ssm_state_size")
_DRAFT_VOCABULARY = 32_000  # of the published recipe


@dataclass(frozen=True)
class Weights:
    """Matrices of one kind: ``count`` weights in each of ``layers`` layers, read once in a forward.

    Where ``split`` is false tensor parallelism leaves all of them to every GPU.
    """

    name: str
    count: int
    layers: int = 1
    format: Format = PLAIN
    split: bool = True

    @property
    def total(self) -> int:
        return self.count * self.layers

    @property
    def bytes(self) -> float:
        return self.total * self.format.bits / 8


@dataclass(frozen=True)
class Experts:
    """Routed experts: each token goes through ``chosen`` of ``number`` in each of ``layers`` layers."""

    number: int
    chosen: int
    count: int  # weights of one expert
    layers: int
    format: Format = PLAIN

    @property
    def total(self) -> int:
        return self.number * self.count * self.layers

    @property
    def bytes_of_one(self) -> float:
        return self.count * self.format.bits / 8

    def touched(self, tokens: int) -> float:
        """Expected distinct experts of a layer that T tokens go through: E (1 - (1 - k/E)^T).

        A token leaves a given expert out with probability 1 - k/E. This takes tokens to be routed independently and
        evenly; tokens that follow each other share more experts than that, so it is an upper estimate.
        """
        return self.number * (1 - (1 - self.chosen / self.number) ** tokens)


@dataclass(frozen=True)
class Attention:
    """Keys and values: ``elements`` numbers a token, layer and kv head. MLA keeps one latent that all GPUs need whole.

    ``flops``: of a query token and a token it looks at, in one layer, all heads. ``windows``: how far each layer looks.
    """

    kind: str
    heads: int
    kv_heads: int
    elements: int
    flops: int
    windows: tuple[int | None, ...]
    element_bytes: float = 2.0

    def rows(self, context: int) -> int:
        """Tokens looked at, over all layers."""
        return sum(context if window is None else min(context, window) for window in self.windows)

    def heads_on_one(self, gpus: int) -> float:
        """KV heads of one GPU: where there are fewer than GPUs, they are copied."""
        return max(1.0, self.kv_heads / gpus)

    @property
    def bytes_per_token(self) -> float:
        """In all layers, on one GPU."""
        return self.elements * self.kv_heads * self.element_bytes * len(self.windows)


def kind_of(heads: int, kv_heads: int) -> str:
    return "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"


@dataclass(frozen=True)
class Model:
    """All that a forward costs. ``weights`` leaves out embeddings, of which only rows are read, and the head."""

    name: str
    layers: int
    hidden: int
    weights: tuple[Weights, ...]
    attention: Attention
    head: Weights
    vocabulary: int  # logits of a token
    embedding: int  # weights, 0 where the head serves as embedding
    kernels: int
    experts: Experts | None = None
    fusion: Weights | None = None  # of a drafter: what brings the target's states to its width

    @property
    def parameters(self) -> int:
        always = sum(weights.total for weights in self.always)
        return self.embedding + always + (self.experts.total if self.experts else 0)

    @property
    def active(self) -> int:
        """Weights that one token is multiplied with."""
        chosen = self.experts.chosen * self.experts.count * self.experts.layers if self.experts else 0
        return sum(weights.total for weights in self.always) + chosen

    @property
    def always(self) -> tuple[Weights, ...]:
        """What every token goes through."""
        return (*self.weights, self.head, *([self.fusion] if self.fusion else []))

    @property
    def bytes(self) -> float:
        experts = self.experts.number * self.experts.bytes_of_one * self.experts.layers if self.experts else 0.0
        return experts + self.embedding * 2 + sum(weights.bytes for weights in self.always)


def read_target(path: str | Path) -> Target:
    """A folder with config.json, the file itself, or ``smollm2``. Raises UsageError or TargetError."""
    file = Path(path).expanduser()
    if not file.is_file():
        return open_target(path)
    return Target(file.parent, read_json(file, TargetError))


def target_model(target: Target, quantization: str | None = None, kv_bytes: float = 2.0) -> Model:
    """What a target's config says it costs. Raises TargetError where it does not describe a transformer decoder."""
    try:
        return _Reader(target, read_quantization(target.config, target.text, quantization), kv_bytes).model()
    except TargetError as error:
        raise TargetError(f"{target.folder}: {error}") from None


class _Reader:
    """Reads one config; whatever is missing or of a kind that cannot be predicted is a TargetError."""

    def __init__(self, target: Target, quantization: Quantization, kv_bytes: float):
        self.target, self.text, self.quantization, self.kv_bytes = target, target.text, quantization, kv_bytes
        self.hidden, self.layers = self.need("hidden_size"), self.need("num_hidden_layers")
        self.heads, self.vocabulary = self.need("num_attention_heads"), self.need("vocab_size")
        other = next((key for key in _OTHER_ATTENTION if self.text.get(key)), None)
        if other:
            raise TargetError(f"its config has {other}: sparse and recurrent layers are not predicted.")

    def need(self, *keys: str) -> int:
        for key in keys:
            if (value := self.target.size(key)) is not None:
                return value
        raise TargetError(f"its config does not describe a language model: it has no {' or '.join(keys)}.")

    def number(self, *keys: str) -> int:
        """The first of these that is a positive integer, or 0."""
        return next((value for key in keys if (value := self.target.size(key)) is not None), 0)

    def model(self) -> Model:
        sparse = self.sparse_layers()
        dense = self.layers - sparse
        attention, weights = self.attention()
        gated = 2 if self.text.get("model_type") in _UNGATED else 3
        if dense:
            width = self.need("intermediate_size_mlp", "intermediate_size", "ffn_hidden_size", "n_inner")
            format = self.format(f"layers.{0 if sparse else self.layers // 2}.mlp.up_proj")
            weights.append(Weights("mlp", gated * self.hidden * width, dense, format))
        experts = self.experts(sparse, weights) if sparse else None
        kernels = self.layers * (ATTENTION_KERNELS + MLP_KERNELS + (MLA_KERNELS if attention.kind == "MLA" else 0))
        shared = any(part.name == "shared experts" for part in weights)
        kernels += OUTER_KERNELS + sparse * (ROUTING_KERNELS + (MLP_KERNELS if shared else 0))
        tied = bool(self.target.config.get("tie_word_embeddings", self.text.get("tie_word_embeddings")))
        size = self.vocabulary * self.hidden
        return Model(
            name=self.target.architecture or str(self.text.get("model_type", "transformer")),
            layers=self.layers,
            hidden=self.hidden,
            weights=tuple(weights),
            attention=attention,
            head=Weights("head", size, 1, self.format("lm_head")),
            vocabulary=self.vocabulary,
            embedding=0 if tied else size,
            kernels=kernels,
            experts=experts,
        )

    def format(self, module: str) -> Format:
        return self.quantization.of(module)

    def attention(self) -> tuple[Attention, list[Weights]]:
        h, heads = self.hidden, self.heads
        format = self.format(f"layers.{self.layers // 2}.self_attn.q_proj")
        windows, n = self.windows(), self.layers
        if latent := self.number("kv_lora_rank"):
            nope, rope, value = self.need("qk_nope_head_dim"), self.need("qk_rope_head_dim"), self.need("v_head_dim")
            low = self.number("q_lora_rank")
            query = (low or h) * heads * (nope + rope)
            weights = [
                Weights("attention", query + latent * heads * (nope + value) + heads * value * h, n, format),
                Weights("attention, shared", h * (low + latent + rope), n, format, split=False),
            ]
            # absorbed into the queries, attention compares and sums latents: DeepSeek-V2, section 2.1
            flops = 2 * heads * (2 * latent + rope)
            return Attention("MLA", heads, 1, latent + rope, flops, windows, self.kv_bytes), weights
        kv = self.number("num_key_value_heads") or heads
        size = self.number("head_dim") or h // heads
        value = self.number("v_head_dim") or size
        projections = Weights("attention", h * (heads + kv) * (size + value), n, format)
        flops = 2 * heads * (size + value)
        return Attention(kind_of(heads, kv), heads, kv, size + value, flops, windows, self.kv_bytes), [projections]

    def windows(self) -> tuple[int | None, ...]:
        window = self.number("sliding_window", "attention_chunk_size") or None
        kinds = self.text.get("layer_types")
        if isinstance(kinds, list) and len(kinds) == self.layers:
            strange = next((kind for kind in kinds if kind not in (*_FULL, *_WINDOWED)), None)
            if strange is not None:
                raise TargetError(f"its config has layers of type {strange!r}: only attention is predicted.")
            return tuple(window if kind in _WINDOWED else None for kind in kinds)
        if window is None or self.text.get("use_sliding_window") is False:
            return (None,) * self.layers
        kind = self.text.get("model_type", "")
        if kind.startswith("llama4"):  # 1 is a layer with RoPE, which is chunked
            rope = self.text.get("no_rope_layers") or [(layer + 1) % 4 for layer in range(self.layers)]
            return tuple(window if each else None for each in rope)
        if period := self.number("sliding_window_pattern") or _PERIODS.get(kind):
            return tuple(None if (layer + 1) % period == 0 else window for layer in range(self.layers))
        if kind in _ALL_WINDOWED:
            return (window,) * self.layers
        raise TargetError(f"its config has a window of {window} and no layer_types: which layers have it is not known.")

    def sparse_layers(self) -> int:
        """How many layers route to experts."""
        if not self.number("n_routed_experts", "num_experts", "num_local_experts"):
            return 0
        frequency = self.text.get("moe_layer_freq", 1)
        if isinstance(frequency, list):
            return sum(bool(each) for each in frequency)
        steps = self.number("decoder_sparse_step", "interleave_moe_layer_step") or frequency
        first = self.number("first_k_dense_replace", "moe_layer_start_index")
        dense = self.text.get("mlp_only_layers") or ()
        if type(steps) is not int or steps < 1:
            raise TargetError(f"its config has moe_layer_freq {steps!r}: which layers have experts is not known.")
        if steps == 1:
            return sum(layer >= first and layer not in dense for layer in range(self.layers))
        return sum(layer >= first and (layer + 1) % steps == 0 and layer not in dense for layer in range(self.layers))

    def experts(self, sparse: int, weights: list[Weights]) -> Experts:
        """The routed ones; what every token goes through (router, shared experts) is added to ``weights``."""
        number = self.need("n_routed_experts", "num_experts", "num_local_experts")
        chosen = self.need("num_experts_per_tok", "num_experts_per_token", "moe_topk")
        width = self.need("moe_intermediate_size", "intermediate_size")
        if chosen > number:
            raise TargetError(f"its config chooses {chosen} of {number} experts.")
        layer = f"layers.{self.layers - 1}.mlp"
        weights.append(Weights("router", self.hidden * number, sparse, split=False))
        count = self.number("n_shared_experts", "num_shared_experts")
        shared = self.number("shared_expert_intermediate_size") or count * width
        if not shared and self.text.get("model_type", "").startswith("llama4"):
            shared = width
        if shared:
            format = self.format(f"{layer}.shared_experts.up_proj")
            weights.append(Weights("shared experts", 3 * self.hidden * shared, sparse, format))
        return Experts(number, chosen, 3 * self.hidden * width, sparse, self.format(f"{layer}.experts.0.up_proj"))


def read_drafter(path: str | Path, target: Model) -> Model:
    """An EAGLE-3 drafter from its config.json alone. Raises CheckpointError where it is none, or not of this target."""
    file = Path(path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    if file.suffix != ".json":
        raise UsageError(f"{file}: a drafter to plan with is a folder with config.json, or that file.")
    reading = dialects.read(Checkpoint(file, read_json(file, CheckpointError, NO_CONFIG), {}))
    if reading.refused:
        raise CheckpointError(f"{'; '.join(reading.problems)}: only EAGLE-3 drafters are predicted.")
    if reading.config.target_hidden_size != target.hidden:
        raise CheckpointError(
            f"{file}: the drafter is made for a target of hidden_size {reading.config.target_hidden_size}, this "
            f"target's is {target.hidden}; take the drafter of this target."
        )
    return drafter_model(reading.config, str(path))


def default_drafter(target: Target, model: Model) -> Model:
    """What the published recipe makes for this target: one Llama layer of its width, and 32,000 draft tokens."""
    width = target.size("intermediate_size") or 4 * model.hidden
    head_dim = target.size("head_dim") or 128
    plain = model.attention.kind != "MLA" and head_dim * model.attention.heads == model.hidden
    heads = model.attention.heads if plain else max(1, model.hidden // 128)
    kv = model.attention.kv_heads if plain else heads
    config = Eagle3Config(
        hidden_size=model.hidden,
        target_hidden_size=model.hidden,
        intermediate_size=width,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=max(1, model.hidden // heads),
        vocab_size=model.vocabulary,
        draft_vocab_size=min(_DRAFT_VOCABULARY, model.vocabulary),
    )
    return drafter_model(config, "of the usual shape")


def drafter_model(config: Eagle3Config, name: str) -> Model:
    """What an EAGLE-3 drafter costs: its first layer reads twice its width, and its head has the draft vocabulary."""
    c, h = config, config.hidden_size
    heads, kv, size = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    inputs = h * (c.num_hidden_layers + 1)  # of all layers together
    weights = (
        Weights("attention", inputs * (heads + 2 * kv) * size + c.num_hidden_layers * heads * size * h),
        Weights("mlp", 3 * h * c.intermediate_size, c.num_hidden_layers),
    )
    return Model(
        name=name,
        layers=c.num_hidden_layers,
        hidden=h,
        weights=weights,
        attention=Attention(kind_of(heads, kv), heads, kv, 2 * size, 4 * heads * size, (None,) * c.num_hidden_layers),
        head=Weights("head", c.draft_vocab_size * h),
        vocabulary=c.draft_vocab_size,
        embedding=0,  # a copy of the target's, or the target's own
        kernels=c.num_hidden_layers * (ATTENTION_KERNELS + MLP_KERNELS) + OUTER_KERNELS + 1,  # one more norm
        fusion=Weights("fusion", c.num_aux * c.target_hidden_size * h) if c.has_fc else None,
    )


def with_kv_bytes(model: Model, element_bytes: float) -> Model:
    return replace(model, attention=replace(model.attention, element_bytes=element_bytes))


def check_parallel(model: Model, gpus: int) -> None:
    """Raises UsageError where tensor parallelism cannot divide the heads."""
    if model.attention.heads % gpus:
        raise UsageError(f"{model.attention.heads} attention heads of {model.name} do not divide among {gpus} GPUs.")


def facts(model: Model) -> Mapping[str, Any]:
    """Sizes for a report."""
    experts = model.experts
    return {
        "name": model.name,
        "layers": model.layers,
        "hidden_size": model.hidden,
        "parameters": model.parameters,
        "active_parameters": model.active,
        "weight_bytes": model.bytes,
        "attention": model.attention.kind,
        "kv_bytes_per_token": model.attention.bytes_per_token,
        "experts": experts and {"number": experts.number, "per_token": experts.chosen, "layers": experts.layers},
    }
