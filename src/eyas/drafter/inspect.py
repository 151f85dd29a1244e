"""What a checkpoint is, from its config and headers: the report behind ``eyas check D``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.drafter import dialects
from eyas.drafter.checkpoint import Checkpoint, refusal
from eyas.drafter.config import Eagle3Config
from eyas.drafter.dialects import IDS, MAPS, LayerIds, Reading


@dataclass(frozen=True)
class DrafterReport:
    """``problems``: why Eyas will not load it. ``odd``: what loads, but is easily misread, here or in an engine."""

    path: Path
    files: tuple[str, ...]
    dialect: str
    evidence: tuple[str, ...]
    architectures: tuple[str, ...]
    config: Eagle3Config  # sizes, norms and vocabulary, whatever the dialect
    layers_found: int  # decoder layers, by their tensors
    layer_ids: LayerIds  # as written, and in both conventions; None there is the default, entry [2, n // 2, n - 3]
    embedding: str
    head: str
    dtypes: tuple[str, ...]  # of the weights, most common first
    parameters: int
    nbytes: int
    problems: tuple[str, ...]
    odd: tuple[str, ...]


def describe(path: str | Path) -> DrafterReport:
    """Reads config, headers and vocabulary maps; torch is needed for a pickled .bin only.

    Raises CheckpointError where the files cannot be understood at all; what can, but will not load, is in ``problems``.
    """
    checkpoint = Checkpoint.open(path)
    reading = dialects.read(checkpoint)
    config = reading.config
    weights = [checkpoint.tensors[original] for name, original in reading.names.items() if name not in MAPS]
    sizes: Counter[str] = Counter()
    for tensor in weights:
        sizes[tensor.dtype] += tensor.count
    return DrafterReport(
        path=checkpoint.path,
        files=tuple(sorted({tensor.file.name for tensor in checkpoint.tensors.values()})),
        dialect=reading.dialect,
        evidence=reading.evidence,
        architectures=reading.architectures,
        config=config,
        layers_found=_layers_found(reading),
        layer_ids=reading.layer_ids,
        embedding="its own" if config.own_embedding else "the target's",
        head="its own" if config.own_head else "its embedding (tied)" if config.tied_head else "the target's",
        dtypes=tuple(dtype for dtype, _ in sizes.most_common()),
        parameters=sum(sizes.values()),
        nbytes=sum(tensor.nbytes for tensor in weights),
        problems=reading.problems,
        odd=(*odd_layer_ids(checkpoint.config, reading), *_odd(checkpoint.config, reading)),
    )


def check_drafter(path: str | Path) -> None:
    """Raises the CheckpointError that ``load_drafter`` would raise for any target: from headers, in milliseconds."""
    checkpoint = Checkpoint.open(path)
    if problems := dialects.read(checkpoint).problems:
        raise refusal(checkpoint.path, list(problems))


def _layers_found(reading: Reading) -> int:
    return len({name.split(".")[1] for name in reading.names if name.startswith("layers.")})


def odd_layer_ids(raw: Mapping[str, Any], reading: Reading) -> list[str]:
    """What about the layer ids is easily misread: of all that can be wrong with a drafter, the hardest to see."""
    ids, nested = reading.layer_ids, raw.get("eagle_config") or {}
    written = list(ids.written)
    n = max(written, default=0) + 3
    notes = [
        (
            nested.get(IDS) and raw.get(IDS),
            f"layer ids stand in eagle_config {nested.get(IDS)} and at the top level {raw.get(IDS)}: {ids.key} is used",
        ),
        (raw.get(IDS) == [] or nested.get(IDS) == [], "an empty list of layer ids: read as the default, as engines do"),
        (written != sorted(written), f"layer ids {written} are not ascending; states are joined in layer order anyhow"),
        (
            ids.convention == "output" and sorted(written) == [2, n // 2, n - 3],
            f"layer ids {written}, read as output ids, equal the default entry ids of a target of {n} layers; the "
            "file cannot tell which convention it was trained with; measure acceptance with both",
        ),
        (
            ids.key == IDS and reading.dialect == "sglang",
            "layer ids stand at the top level, where SGLang ignores them and captures the default; vLLM reads them",
        ),
    ]
    return [note for applies, note in notes if applies]


def _odd(raw: Mapping[str, Any], reading: Reading) -> list[str]:
    c, names, text = reading.config, reading.names, raw.get("transformer_layer_config") or raw
    found, said = _layers_found(reading), text.get("num_hidden_layers", 1)
    reduced, mapped = c.draft_vocab_size < c.vocab_size, "d2t" in names
    foreign = [key for key in ("norm_before_residual", "qk_norm", "attention_bias") if getattr(c, key)]
    speculators = "speculators_config" in raw or "speculators_model_type" in raw
    notes = [
        (found != said, f"num_hidden_layers is {said} in the config, the tensors are of {found} layer(s)"),
        (
            reading.dialect == "eagle",
            "no EAGLE-3 architecture name: SGLang needs LlamaForCausalLMEagle3 and fails after loading; vLLM loads it",
        ),
        (
            any("layers.0." in original for original in names.values()),
            "the layer is named layers.0: SGLang before 0.5.23 knows midlayer only and silently drops its weights",
        ),
        ("draft_vocab_size" not in raw, "draft_vocab_size is missing: read as the full vocabulary; SGLang fails"),
        (reduced and not mapped, "no d2t with a reduced vocabulary: engines take draft ids for target ids"),
        (reduced and mapped and "t2d" not in names, "t2d is missing; it follows from d2t"),
        (not reduced and mapped, "d2t is present with a full vocabulary: vLLM refuses to load it"),
        (
            text.get("tie_word_embeddings") and c.own_head,
            "tie_word_embeddings is true though there is an lm_head.weight: SGLang ties, and loads the wrong one",
        ),
        (
            c.own_embedding and c.hidden_size == c.target_hidden_size,
            "embed_tokens.weight is used by Eyas and vLLM; SGLang replaces it by the target's embedding",
        ),
        (
            c.norm_output and reading.dialect == "sglang",
            "norm_output is true: SGLang, vLLM and Eyas feed the normed state to the next step; SpecForge 0.2 means "
            "something else by the key, and trains with the state before the norm",
        ),
        (
            speculators and "norm_before_residual" not in raw,
            "norm_before_residual is missing: read as true, as vLLM does; speculators itself means false",
        ),
        (foreign, f"{', '.join(foreign)}: SGLang has no such drafter and computes something else"),
        (
            c.max_position_embeddings <= 2048,
            f"max_position_embeddings is {c.max_position_embeddings}: engines that size their rotary table by it fail "
            "or degrade on longer prompts",
        ),
        (
            "mrope" in str(text.get("rope_scaling")) + str(text.get("rope_parameters")),
            "multi-axis RoPE: Eyas gives each token one position, exact for text, approximate within images",
        ),
    ]
    return [note for applies, note in notes if applies]
