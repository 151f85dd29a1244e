"""The report on a checkpoint: what it is, and what about it is easily misread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafter.folders import IDS, LLAMA, D, H, V, noise, weights, write

from eyas.drafter.inspect import describe


def test_a_report_says_what_it_is(tmp_path: Path) -> None:
    report = describe(write(tmp_path))
    assert report.files == ("model.safetensors",)
    assert (report.dialect, report.architectures) == ("sglang", ("LlamaForCausalLMEagle3",))
    assert report.evidence == ("architecture LlamaForCausalLMEagle3", "config key eagle_config")
    assert report.layer_ids.written == (1, 4, 6)
    assert report.layer_ids.entry == (2, 5, 7)
    assert report.layer_ids.output == (1, 4, 6)
    assert (report.layers_found, report.config.hidden_size) == (1, H)
    assert (report.embedding, report.head) == ("the target's", "its own")
    count = sum(t.numel() for name, t in weights().items() if name not in ("d2t", "t2d"))
    assert (report.parameters, report.nbytes, report.dtypes) == (count, 4 * count, ("F32",))
    assert report.problems == ()
    assert report.odd == ()


def test_a_bin_is_reported_too(tmp_path: Path) -> None:
    report = describe(write(tmp_path, "eagle"))
    assert report.layer_ids.entry is None
    assert report.layer_ids.output is None
    assert report.dtypes == ("F32",)
    assert any("num_hidden_layers is 40 in the config, the tensors are of 1" in note for note in report.odd)
    assert any("SGLang needs LlamaForCausalLMEagle3" in note for note in report.odd)


def test_what_will_not_load_is_still_described(tmp_path: Path) -> None:
    report = describe(write(tmp_path, architectures=["Eagle3DeepseekV2ForCausalLM"]))
    assert report.config.draft_vocab_size == D
    assert any("Eagle3DeepseekV2ForCausalLM is not supported" in problem for problem in report.problems)
    assert describe(write(tmp_path / "t", without=("norm.weight",))).problems


FULL = {
    "lm_head.weight": noise((V, H)),
    "d2t": torch.zeros(V, dtype=torch.int64),
    "t2d": torch.ones(V, dtype=torch.bool),
}
ODD = {
    "entry default as output": ("sglang", {"eagle_config": {IDS: [2, 30, 58]}}, "default entry ids of a target of 61"),
    "ids twice": ("sglang", {IDS: [1, 4, 6]}, f"eagle_config.{IDS} is used"),
    "ids empty": ("sglang", {"eagle_config": {IDS: []}}, "an empty list of layer ids"),
    "ids unsorted": ("vllm", {IDS: [5, 2, 7]}, "not ascending"),
    "ids at the top": ("sglang", {"eagle_config": ..., IDS: [2, 5, 7]}, "SGLang ignores them"),
    "d2t missing": ("sglang", {"without": ("d2t", "t2d")}, "engines take draft ids for target ids"),
    "t2d missing": ("sglang", {"without": ("t2d",)}, "t2d is missing"),
    "d2t with all": ("sglang", {"tensors": FULL, "draft_vocab_size": V}, "vLLM refuses to load it"),
    "no draft size": ("sglang", {"tensors": FULL, "draft_vocab_size": ...}, "draft_vocab_size is missing"),
    "tied": ("sglang", {"tie_word_embeddings": True}, "SGLang ties, and loads the wrong one"),
    "embedding": ("sglang", {"tensors": {"embed_tokens.weight": noise((V, H))}}, "SGLang replaces it"),
    "norm_output": ("sglang", {"norm_output": True}, "SpecForge 0.2 means something else"),
    "positions": ("sglang", {"max_position_embeddings": 2048}, "max_position_embeddings is 2048"),
    "multi-axis": (
        "sglang",
        {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        "approximate within images",
    ),
    "residual": ("vllm", {}, "norm_before_residual: SGLang has no such drafter"),
    "residual missing": ("vllm", {"norm_before_residual": ...}, "speculators itself means false"),
    "layers.0": ("vllm", {}, "knows midlayer only"),
    "layer count": ("sglang", {"num_hidden_layers": 3}, "num_hidden_layers is 3 in the config"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_things_are_noticed(tmp_path: Path, name: str) -> None:
    dialect, changes, expected = ODD[name]
    odd = describe(write(tmp_path, dialect, **changes)).odd
    assert any(expected in note for note in odd), odd


def test_speculators_nest_their_layer(tmp_path: Path) -> None:
    report = describe(write(tmp_path, "vllm", transformer_layer_config={**LLAMA, "max_position_embeddings": 2048}))
    assert any("2048" in note for note in report.odd)
    assert report.config.rope["rope_theta"] == 5000.0
