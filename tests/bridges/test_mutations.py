"""A target, a drafter and a real engine that fit, broken in one place at a time: each break is found, and nothing else.

What an engine makes of a break was read in its source; it is written here for every engine: "bad" is to be found,
"good" is to raise no alarm.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from bridges import pairs
from bridges.pairs import D, H, V, zeros
from bridges.wheels import engine
from drafter import folders

from eyas.bridges.check import check
from eyas.bridges.report import Report
from eyas.core import EyasError

IDS = "eagle_aux_hidden_state_layer_ids"
ENGINES = ("sglang-0.5.9", "sglang-0.5.23", "vllm-0.32.0")
WRAPPER = {"architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl", "text_config": pairs.TARGET}
FILES = {"tokenizer.json": {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<end>"}]}}


@dataclass(frozen=True)
class Mutation:
    """``answers``: what 0.5.9, 0.5.23 and vLLM make of it, one letter each: b(ad), g(ood), - (not asked)."""

    name: str
    answers: str
    drafter: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    also: Callable[[Path, Path], object] | None = None  # done to the two folders
    whole: bool = False  # ``target`` is a whole config


def files(folder: Path, **contents: Any) -> None:
    for name, content in contents.items():
        (folder / name.replace("__", ".")).write_text(content if isinstance(content, str) else json.dumps(content))


def tokenizers(drafter_vocab: dict[str, int], added: tuple[str, ...] = ()) -> Callable[[Path, Path], object]:
    """``added``: tokens that the target has beyond those of both."""

    def both(target: Path, drafter: Path) -> None:
        more = [{"id": 3 + i, "content": content} for i, content in enumerate(added)]
        whole = FILES["tokenizer.json"]
        files(target, tokenizer__json={**whole, "added_tokens": [*whole["added_tokens"], *more]})
        files(
            drafter,
            tokenizer__json={"model": {"vocab": drafter_vocab}, "added_tokens": [{"id": 2, "content": "<end>"}]},
        )

    return both


def templates(one: str, other: str) -> Callable[[Path, Path], object]:
    def both(target: Path, drafter: Path) -> None:
        files(target, tokenizer_config__json={"chat_template": one})
        files(drafter, chat_template__jinja=other)

    return both


def cut(target: Path, drafter: Path) -> None:
    content = (drafter / "model.safetensors").read_bytes()
    (drafter / "model.safetensors").write_bytes(content[:-100])


def nested(*ids: Any) -> dict[str, Any]:
    return {"eagle_config": {IDS: list(ids)}, IDS: ...}


def top(*ids: Any) -> dict[str, Any]:
    return {"eagle_config": ..., IDS: list(ids)}


def extra(**tensors: torch.Tensor) -> dict[str, Any]:
    return {"tensors": {name.replace("__", "."): value for name, value in tensors.items()}}


def maps(ids: list[int]) -> dict[str, Any]:
    offsets = torch.tensor(ids) - torch.arange(len(ids))
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[[i for i in ids if 0 <= i < V]] = True
    return {"tensors": {"d2t": offsets, "t2d": t2d}}


TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16}
SPECULATION = {"method": "eagle3", "num_speculative_tokens": 3}
CHAIN = {"speculative_num_steps": 5, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 6}
EAGER = {"disable_cuda_graph": True}
BERT = {"architectures": ["BertModel"], "speculators_model_type": ..., "model_type": "bert"}
FULL = {"draft_vocab_size": V, "without": ("d2t", "t2d"), **extra(lm_head__weight=zeros(V, H))}
FP8 = {"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}
THETA = {"rope_theta": 5000.0}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}


def on_pages(size: int, backend: str) -> dict[str, Any]:
    return {**TREE, "page_size": size, "attention_backend": backend}


def given(**keys: Any) -> dict[str, Any]:
    return {"speculative_config": {**SPECULATION, **keys}}


BROKEN = [
    # the drafter's config
    Mutation("architecture of a whole model", "bb-", {"architectures": ["LlamaForCausalLM"]}),
    Mutation("architecture of another model", "bbb", BERT),
    Mutation("no architecture", "bb-", {"architectures": ...}),
    Mutation("no model_type", "bb-", {"model_type": ...}),
    Mutation("no draft_vocab_size", "bbb", {"draft_vocab_size": ...}),
    Mutation("draft_vocab_size of another file", "bbb", {"draft_vocab_size": D + 4}),
    Mutation("draft_vocab_size null with a head of its own", "bbb", {"draft_vocab_size": None}),
    Mutation("two layers for one", "bb-", {"num_hidden_layers": 2}),
    Mutation("hidden size", "bb-", {"hidden_size": 2 * H}),
    Mutation("intermediate size", "bb-", {"intermediate_size": 64}),
    Mutation("heads", "bb-", {"num_attention_heads": 8, "head_dim": 8}),
    Mutation("made for another hidden size", "bbb", {"target_hidden_size": 2 * H}),
    Mutation("made for another vocabulary", "bb-", {"vocab_size": 2 * V}),
    Mutation("positions end too early", "bbg", {"max_position_embeddings": 1024}),
    Mutation("a residual that starts normed", "bb-", {"norm_before_residual": True}),
    Mutation("EAGLE-3.1 output norm", "bgg", {"norm_output": True}),
    Mutation("EAGLE-1", "bb-", {"eagle_config": {IDS: [1, 4, 6], "use_aux_hidden_state": False}}),
    Mutation("RoPE as transformers 5 spells it", "bg-", {"rope_theta": ..., "rope_parameters": {"rope_theta": 5000.0}}),
    Mutation("scaling as transformers 5 spells it", "bg-", {"rope_parameters": {**YARN, **THETA}}),
    Mutation("a tied head beside its own", "bb-", {"tie_word_embeddings": True}),
    Mutation("a model type that nobody knows", "bb-", {"model_type": "frobnicate"}),
    Mutation("a model type that is a list", "bb-", {"model_type": ["llama"]}),
    Mutation("another dtype than the target's", "bb-", {"torch_dtype": "float16"}, {"torch_dtype": "bfloat16"}),
    Mutation("another dtype, in the newer spelling", "bb-", {"dtype": "bfloat16"}, {"dtype": "float16"}),
    Mutation("no dtype, which counts as float16", "bb-", target={"torch_dtype": "bfloat16"}),
    Mutation("a dtype that there is not", "bb-", flags={"dtype": "fp16"}),
    Mutation("a speculators model type that nobody knows", "--b", {"speculators_model_type": "eagle9"}),
    # layer ids
    Mutation("ids at the top level in SGLang", "bb-", top(1, 5, 7)),
    Mutation("ids nested in a speculators config", "--b", {**nested(0, 4, 6), IDS: ...}),
    Mutation("ids that are the default in the other convention", "bb-", nested(2, 5, 7)),
    Mutation("ids of the other convention in vLLM", "--b", {IDS: [1, 4, 6]}),
    Mutation("an id beyond the target", "bb-", nested(1, 4, 12)),
    Mutation("an id beyond the target in vLLM", "--b", {IDS: [2, 5, 12]}),
    Mutation("the state behind the last layer", "bb-", nested(1, 4, 9)),
    Mutation("an id twice", "bb-", nested(1, 4, 4)),
    Mutation("two ids for three states", "bb-", nested(1, 4)),
    Mutation("four ids for three states", "bb-", nested(1, 3, 4, 6)),
    Mutation("four ids for three states in vLLM", "--b", {IDS: [2, 4, 5, 7]}),
    Mutation("an empty list of ids", "bb-", nested()),
    Mutation("the embedding, before there is a residual", "bg-", nested(-1, 4, 6), flags=EAGER),
    Mutation("ids as text", "bb-", nested("1", "4", "6")),
    # tensors
    Mutation("no d2t", "bbb", {"without": ("d2t",)}),
    Mutation("d2t of target ids", "bbb", extra(d2t=folders.CHOSEN)),
    Mutation("d2t beyond the vocabulary", "bbb", maps([*range(D - 1), V + 3])),
    Mutation("d2t with a token twice", "bbb", maps([*range(D - 1), 3])),
    Mutation("t2d of another vocabulary", "bbb", extra(t2d=torch.ones(V, dtype=torch.bool))),
    Mutation("no head", "bbb", {"without": ("lm_head.weight",)}),
    Mutation("no fc", "bbb", {"without": ("fc.weight",)}),
    Mutation("fc of another target", "bbb", extra(fc__weight=zeros(H, 3 * 48))),
    Mutation("norms over each head", "bb-", extra(midlayer__self_attn__q_norm__weight=zeros(8))),
    Mutation("attention bias", "bb-", {"attention_bias": True, **extra(midlayer__self_attn__q_proj__bias=zeros(32))}),
    Mutation("a norm over each state without its switch", "bbb", extra(fc_norm__0__weight=zeros(H))),
    Mutation("a tensor that nobody knows", "bbb", extra(gate__weight=zeros(2, 2))),
    Mutation("a truncated file", "bbb", also=cut),
    # the target
    Mutation("a deeper interface is missing", "bb-", target={"architectures": ["BaichuanForCausalLM"]}),
    Mutation("an unknown architecture", "bbb", target={"architectures": ["NobodyForCausalLM"]}),
    Mutation("a wrapper that forwards nothing", "bbb", target=WRAPPER, whole=True),
    Mutation("a target of another hidden size", "bbb", target={"hidden_size": 2 * H}),
    Mutation("a target of another vocabulary", "bbb", target={"vocab_size": 2 * V}),
    Mutation("a target that is too shallow", "bbb", target={"num_hidden_layers": 5}),
    # tokenizers
    Mutation("two tokens exchanged", "bbb", also=tokenizers({"a": 1, "b": 0})),
    Mutation("a larger vocabulary", "bbb", also=tokenizers({"a": 0, "b": 1, "c": 3})),
    Mutation("another chat template", "bbb", also=templates("{{ a }}", "{% for b in a %}{{ b }}{% endfor %}")),
    # flags and the environment
    Mutation("a tree on pages, on a backend that cannot", "bb-", flags=on_pages(64, "flashmla")),
    Mutation("a tree on a backend for chains", "bb-", flags=on_pages(1, "trtllm_mha")),
    Mutation("more draft tokens than the tree has", "bb-", flags={**TREE, "speculative_num_draft_tokens": 64}),
    Mutation("no steps", "bb-", flags={**CHAIN, "speculative_num_steps": 0}),
    Mutation("steps below none", "bb-", flags={**CHAIN, "speculative_num_steps": -1}),
    Mutation("no candidates", "bb-", flags={**CHAIN, "speculative_eagle_topk": 0}),
    Mutation("no draft tokens in a tree", "bb-", flags={**TREE, "page_size": 1, "speculative_num_draft_tokens": 0}),
    Mutation("the algorithm of EAGLE-1", "bb-", flags={"speculative_algorithm": "EAGLE"}),
    Mutation("an algorithm without a drafter", "bb-", flags={"speculative_algorithm": "NGRAM"}),
    Mutation("quantised like a target of AWQ", "bb-", flags={"quantization": "awq"}),
    Mutation("two pipeline stages", "bb-", flags={"pp_size": 2}),
    Mutation("two pipeline stages, written out", "bb-", flags={"pipeline_parallel_size": 2}),
    Mutation("top-k without steps", "bb-", flags={"speculative_eagle_topk": 4}),
    Mutation("acceptance made up in SGLang", "bb-", environment={"SGLANG_SIMULATE_ACC_LEN": "3.5"}),
    Mutation("rejection sampling with a reduced vocabulary", "-b-", flags={"speculative_use_rejection_sampling": True}),
    Mutation("acceptance made up in vLLM", "--b", flags=given(rejection_sample_method="synthetic")),
    Mutation("no number of tokens", "--b", flags={"speculative_config": {"method": "eagle3"}}),
    Mutation("another method", "--b", flags=given(method="medusa")),
    Mutation("a key that vLLM does not have", "--b", flags=given(eagle_topk=4)),
    Mutation("broken JSON for a config", "--b", flags={"speculative_config": "eagle3"}),
]  # fmt: skip

SOUND = [
    Mutation("nothing", "ggg"),
    Mutation("keys that mean nothing", "ggg", {"bos_token_id": 3, "transformers_version": "4.40", "some_key": [1]}),
    Mutation("no t2d, which follows from d2t", "ggg", {"without": ("t2d",)}),
    Mutation("its own embedding", "ggg", extra(embed_tokens__weight=zeros(V, H))),
    Mutation("a buffer of rotary frequencies", "gg-", extra(midlayer__self_attn__rotary_emb__inv_freq=zeros(4))),
    Mutation("ids in another order", "gg-", nested(6, 1, 4)),
    Mutation("ids nested in a speculators config, and the default anyhow", "--g", {**nested(1, 4, 6), IDS: ...}),
    Mutation("one dtype in two spellings", "gg-", {"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    Mutation("float32, which counts as float16", "gg-", {"torch_dtype": "float32"}, {"torch_dtype": "float16"}),
    Mutation("a dtype for both", "gg-", {"torch_dtype": "float16"}, {"dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    Mutation("a quantised target of the same dtype", "gg-", {"dtype": "bfloat16"}, FP8),
    Mutation("the algorithm as the newer versions take it", "-g-", flags={"speculative_algorithm": "eagle3"}),
    Mutation("quantised as it is loaded", "gg-", flags={"quantization": "fp8"}),
    Mutation("one pipeline stage", "gg-", flags={"pp_size": 1}),
    Mutation("no draft tokens in a chain: put right", "gg-", flags={**CHAIN, "speculative_num_draft_tokens": 0}),
    Mutation("no number for acceptance that is made up", "gg-", environment={"SGLANG_SIMULATE_ACC_LEN": "abc"}),
    Mutation("no ids", "ggg", {"eagle_config": ..., IDS: ...}),
    Mutation("other ids", "gg-", {**nested(0, 3, 8)}, flags=EAGER),
    Mutation("other ids in vLLM", "--g", {IDS: [1, 4, 10]}),
    Mutation("yarn, in both spellings", "gg-", {"rope_scaling": YARN, "rope_parameters": {**YARN, **THETA}}),
    Mutation("more positions than the target", "ggg", {"max_position_embeddings": 65536}),
    Mutation("a name as EAGLE spells it", "--g", {"speculators_model_type": "eagle3"}),
    Mutation("a full vocabulary", "gg-", FULL),
    Mutation("the target's head", "gg-", {"draft_vocab_size": None, "without": ("d2t", "t2d", "lm_head.weight")}),
    Mutation("a tree on single pages", "gg-", flags=on_pages(1, "flashinfer")),
    Mutation("a tree on pages, on a backend that can", "gg-", flags=on_pages(64, "fa3")),
    Mutation("a chain", "gg-", flags=CHAIN),
    Mutation("a speculative config", "--g", flags=given()),
    Mutation("the same tokenizer", "ggg", also=tokenizers({"b": 1, "a": 0})),
    Mutation("a tokenizer with tokens added in the target", "ggg", also=tokenizers({"a": 0, "b": 1}, ("<x>", "<y>"))),
    Mutation("the same template", "ggg", also=templates("{{ messages }}", "{{ messages }}\n")),
    Mutation("a target of twice the depth", "gg-", target={"num_hidden_layers": 20}, flags=EAGER),
    Mutation("another text model", "ggg", target={"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}),
]  # fmt: skip


def ask(name: str, folder: Path, mutation: Mutation) -> Report:
    config = mutation.target if mutation.whole else {**pairs.TARGET, **mutation.target}
    target = pairs.target(folder / "target", config)
    dialect = "vllm" if name.startswith("vllm") else "sglang"
    changes = dict(mutation.drafter)
    changes["tensors"] = {_named(n, dialect): value for n, value in changes.get("tensors", {}).items()}
    drafter = pairs.drafter(folder / "drafter", dialect, **changes)
    if mutation.also:
        mutation.also(target, drafter)
    return check(target, drafter, engine(name), mutation.flags, mutation.environment)


def _named(name: str, dialect: str) -> str:
    return name.replace("midlayer.", "layers.0.") if dialect == "vllm" else name


def cases(mutations: list[Mutation], answer: str) -> list[Any]:
    return [
        pytest.param(name, mutation, id=f"{name}-{mutation.name.replace(' ', '_')}")
        for mutation in mutations
        for name, given in zip(ENGINES, mutation.answers, strict=True)
        if given == answer
    ]


@pytest.mark.parametrize(("name", "mutation"), cases(BROKEN, "b"))
def test_what_is_broken_is_found(name, mutation, tmp_path):
    try:
        report = ask(name, tmp_path, mutation)
    except EyasError as error:  # nothing can be said about files that cannot be read at all, but why
        assert len(str(error).splitlines()) == 1
        return
    found = [p for p in report.problems if p.severity != "note"]
    assert found and all(p.evidence and p.consequence and p.fix for p in found if p.severity != "undecided")
    assert report.fits is all(p.severity == "undecided" for p in found)


@pytest.mark.parametrize(("name", "mutation"), [*cases(SOUND, "g"), *cases(BROKEN, "g")])
def test_what_is_sound_raises_no_alarm(name, mutation, tmp_path):
    report = ask(name, tmp_path, mutation)
    assert [p for p in report.problems if p.severity != "note"] == [] and report.fits


SEEDS = range(16)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("seed", SEEDS)
def test_any_tensor_may_be_lost_renamed_or_resized(name, seed, tmp_path):
    chance = random.Random(seed)
    dialect = "vllm" if name.startswith("vllm") else "sglang"
    tensors = {n: t for n, t in folders.weights(dialect).items() if n not in ("d2t", "t2d")}
    lost = chance.choice(sorted(tensors))
    shape = [size + chance.randint(1, 3) for size in tensors[lost].shape]
    change = chance.choice([{}, {lost + "s": tensors[lost]}, {lost: zeros(*shape)}])
    without = () if lost in change else (lost,)
    report = ask(name, tmp_path, Mutation("", "", {"without": without, "tensors": change}))
    part = lost.removeprefix("midlayer.").removeprefix("layers.0.")
    assert not report.fits and any(part in p.evidence for p in report.problems)
