"""The check on the engines as published: what people met with each, and an independent listing of their models."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from zipfile import ZipFile

import pytest
from bridges import pairs
from bridges.listing import Listing
from bridges.wheels import WHEELS, engine, wheel
from drafter import folders

from eyas.bridges.case import Case
from eyas.bridges.check import check
from eyas.bridges.code.values import Record
from eyas.bridges.matrix import Row, matrix
from eyas.bridges.report import Problem, Report
from eyas.bridges.sglang.calls import calls
from eyas.bridges.target import open_target
from eyas.drafter import dialects
from eyas.drafter.checkpoint import Checkpoint

IDS = "eagle_aux_hidden_state_layer_ids"
SGLANG = [name for name in WHEELS if name.startswith("sglang")]
OLD = ["sglang-0.5.8", "sglang-0.5.9"]


@pytest.fixture
def ask(tmp_path: Path):
    def run(name: str, target: dict | None = None, dialect: str = "", flags: dict | None = None, **drafter) -> Report:
        environment = drafter.pop("environment", {})
        folder = pairs.target(tmp_path / "target", target)
        dialect = dialect or ("vllm" if name.startswith("vllm") else "sglang")
        return check(
            folder, pairs.drafter(tmp_path / "drafter", dialect, **drafter), engine(name), flags or {}, environment
        )

    return run


def bad(report: Report) -> list[Problem]:
    return [p for p in report.problems if p.severity != "note"]


def the(report: Report, *words: str) -> Problem:
    found = [p for p in bad(report) if all(w in f"{p.evidence} {p.consequence} {p.fix}" for w in words)]
    assert len(found) == 1, report.problems
    return found[0]


# The founding case


def test_kimi_k25_in_the_version_that_could_not(ask):
    """Both missing methods, both stages, and the callers, at once and without weights."""
    report = ask("sglang-0.5.9", pairs.KIMI)
    first = the(report, "KimiK25ForConditionalGeneration has no set_eagle3_layers_to_capture")
    for caller in ("model_runner.py:1906", "cuda_graph_runner.py:365", "model_runner.py:622"):
        assert f"model_executor/{caller}" in first.evidence
    when = "dies at kernel warm-up or at graph capture, after the target's weights are loaded: AttributeError"
    assert first.consequence == when
    second = the(report, "has no get_embed_and_head", "speculative/eagle_worker.py:157")
    assert "after both are loaded: AttributeError" in second.consequence
    assert all("DeepseekV3ForCausalLM in self.language_model has it" in p.fix for p in (first, second))
    assert not report.fits


def test_what_waits_behind_the_missing_interface(ask):
    """Kimi's published ids: graphs are captured with the default layers, prefill with one layer later (PR 22836)."""
    problem = the(ask("sglang-0.5.9", pairs.KIMI, eagle_config={IDS: [2, 5, 7]}), "captures the CUDA graphs")
    assert "cuda_graph_runner.py:365" in problem.evidence
    assert "entry ids [2, 5, 7]; the drafter's [3, 6, 8] are set only behind it" in problem.evidence
    assert problem.severity == "silent" and problem.issue.endswith("/22836")


def test_kimi_k25_in_a_version_that_can(ask):
    assert ask("sglang-0.5.23", pairs.KIMI).fits and ask("vllm-0.32.0", pairs.KIMI).fits


@pytest.mark.parametrize(("name", "said"), [("sglang-0.5.9", True), ("sglang-0.5.23", False)])
def test_images_that_do_not_reach_the_drafter(ask, name, said):
    found = [p for p in ask(name, pairs.KIMI).problems if "mm_input_embeds" in p.evidence]
    assert [p.severity for p in found] == (["note"] if said else [])


def test_kimi_k25_before_it_was_known(ask):
    the(ask("sglang-0.5.8", pairs.KIMI), "KimiK25ForConditionalGeneration; sglang 0.5.8 registers none such")


# The contract


CONTRACT = {
    "sglang-0.5.8": ["model_runner.py:1767", "cuda_graph_runner.py:361", "model_runner.py:588", "eagle_worker.py:153"],
    "sglang-0.5.9": ["model_runner.py:1906", "cuda_graph_runner.py:365", "model_runner.py:622", "eagle_worker.py:157"],
    "sglang-0.5.23": ["pp_draft_embedding.py:95", "attention_backend_setup.py:61"],
}


@pytest.mark.parametrize("name", SGLANG)
def test_the_contract_is_read_off_the_callers(name, tmp_path):
    arguments = Record({"disable_overlap_schedule": True, "enable_multi_layer_eagle": False})
    source = engine(name)
    found = calls(Case(source, *_pair(tmp_path)).classes, arguments)
    needed = [c for c in found if c.side == "target" and c.site.called and not c.site.asked_first]
    assert {c.name for c in needed} == {"set_eagle3_layers_to_capture", "get_embed_and_head"}
    assert [c.site.at(source).split("/")[-1] for c in needed] == CONTRACT[name]
    drafter = {c.name for c in found if c.side == "drafter" and not c.site.asked_first}
    assert drafter == {"set_embed", "set_embed_and_head", "hot_token_id"}


def _pair(folder: Path):
    checkpoint = Checkpoint.open(pairs.drafter(folder / "drafter", "sglang"))
    return open_target(pairs.target(folder / "target")), checkpoint, dialects.read(checkpoint)


# Dtypes, algorithms and stages


RULES = {"sglang-0.5.8": "configs/model_config.py:", "sglang-0.5.9": "configs/model_config.py:1119"}
RULES["sglang-0.5.23"] = "configs/model_config.py:2284"
BF16, FP16 = {"torch_dtype": "bfloat16"}, {"torch_dtype": "float16"}


@pytest.mark.parametrize("name", SGLANG)
def test_a_drafter_of_another_dtype(ask, tmp_path, name):
    """PR 25894: the drafter is built in its own dtype, and fed the target's states."""
    problem = the(ask(name, {**pairs.TARGET, **BF16}, **FP16), "dtype")
    assert f"{tmp_path / 'target' / 'config.json'} has torch_dtype bfloat16" in problem.evidence
    assert f"{tmp_path / 'drafter' / 'config.json'} has torch_dtype float16" in problem.evidence
    assert RULES[name] in problem.evidence and problem.issue.endswith("/25894") and problem.severity == "fails"
    assert re.search(r"fc \(models/llama_eagle3\.py:\d+\) gets states of another dtype", problem.consequence)
    assert "--dtype bfloat16" in problem.fix
    assert "no torch_dtype, which makes the drafter float16" in the(ask(name, {**pairs.TARGET, **BF16}), "dty").evidence
    assert ask(name, {**pairs.TARGET, **BF16}, flags={"dtype": "bfloat16"}, **FP16).fits
    assert ask(name, {**pairs.TARGET, **BF16}, dtype="bfloat16").fits


@pytest.mark.parametrize(("name", "known"), [("sglang-0.5.9", False), ("sglang-0.5.23", True)])
def test_the_dtype_of_a_model_inside_another(ask, name, known):
    """Its own config decides; where that has none, 0.5.23 lends it the outer one, before it transformers may."""

    def found(outer: dict, inner: dict, drafter: dict) -> list[Problem]:
        kimi = {**pairs.KIMI, **outer, "text_config": {**pairs.KIMI["text_config"], **inner}}
        return [p for p in ask(name, kimi, **drafter).problems if "dtype" in p.evidence]

    assert not found(BF16, {"dtype": "bfloat16"}, BF16) and not found({}, BF16, {"dtype": "bfloat16"})
    (problem,) = found(BF16, FP16, BF16)
    assert "text_config.torch_dtype float16, which makes the target float16" in problem.evidence
    assert [p.severity for p in found(BF16, {}, BF16)] == ([] if known else ["note"])
    assert [p.severity for p in found(BF16, {}, FP16)] == (["fails"] if known else [])


@pytest.mark.parametrize("name", ["sglang-0.5.9", "sglang-0.5.23"])
def test_a_dtype_that_sglang_chooses(ask, name):
    """Some architectures get bfloat16 whatever is asked for, and so do their drafters; Gemma gets it by default."""
    for architecture in ("PixtralForConditionalGeneration", "GptOssForCausalLM"):
        report = ask(name, {**pairs.TARGET, **BF16, "architectures": [architecture]})
        assert not [p for p in report.problems if "dtype" in p.evidence]
    report = ask(name, {**pairs.TARGET, "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]})
    the(report, "no torch_dtype, which makes the target bfloat16", "no torch_dtype, which makes the drafter float16")


@pytest.mark.parametrize(
    ("name", "where", "stages"),
    [
        ("sglang-0.5.9", "model_runner.py:364", "server_args.py:5137 raises AssertionError"),
        ("sglang-0.5.23", "spec_aux_hidden_state.py:193", "validation_hook.py:132 raises AssertionError"),
    ],
)
def test_flags_that_no_eagle3_drafter_can_have(ask, name, where, stages):
    problem = the(ask(name, flags={"speculative_algorithm": "EAGLE"}), "under EAGLE3 only", where)
    assert problem.severity == "silent" and "skips fc" in problem.consequence
    wider = {"target_hidden_size": 48, "tensors": {"fc.weight": pairs.zeros(32, 144)}}
    report = ask(name, {**pairs.TARGET, "hidden_size": 48}, flags={"speculative_algorithm": "NEXTN"}, **wider)
    assert the(report, "NEXTN").severity == "fails"
    the(ask(name, flags={"pp_size": 2}), stages, "Pipeline parallelism")


@pytest.mark.parametrize("name", SGLANG)
def test_a_drafter_quantised_like_its_target(ask, tmp_path, name):
    """--quantization is inherited; AWQ reads its parameters from files, FP8 needs none, and there is a way out."""
    awq = {"quantization": "awq"}
    problem = the(ask(name, flags=awq), "--quantization awq goes for the drafter", "quant_config.json", "unquant")
    assert problem.severity == "fails" and "while the drafter is loaded" in problem.consequence
    for flags in ({"quantization": "fp8"}, {**awq, "speculative_draft_model_quantization": "unquant"}, {}):
        assert ask(name, flags=flags).fits
    own = {"speculative_draft_model_quantization": "awq"}
    the(ask(name, flags=own), "--speculative-draft-model-quantization awq goes for the drafter")
    (tmp_path / "drafter" / "quantize_config.json").write_text("{}")
    assert ask(name, flags=awq).fits


def test_the_embedding_as_a_state(ask):
    """0.5.9's Llama adds a residual that is not there yet; its Qwen2 asks first, and 0.5.23 too."""
    embedding = {"eagle_config": {IDS: [-1, 4, 6]}, "flags": {"disable_cuda_graph": True}}
    problem = the(ask("sglang-0.5.9", **embedding), "models/llama.py:383 adds the residual", "TypeError")
    assert problem.severity == "fails"
    for target in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert ask("sglang-0.5.9", {**pairs.TARGET, "architectures": [target]}, **embedding).fits
    assert ask("sglang-0.5.23", **embedding).fits


@pytest.mark.parametrize("name", SGLANG)
def test_an_empty_list_of_ids(ask, name):
    problem = the(ask(name, eagle_config={IDS: []}), f"{IDS} is []", "no layer is captured, fc takes 3 states")
    assert problem.severity == "fails" and problem.fix.startswith(f"remove {IDS}")


@pytest.mark.parametrize("name", ["sglang-0.5.9", "vllm-0.32.0"])
@pytest.mark.parametrize("kind", ["frobnicate", ["llama"], "", None])
def test_a_model_type_that_nobody_knows(ask, name, kind):
    report = ask(name, dialect="sglang", model_type=kind, architectures=["LlamaForCausalLMEagle3"])
    (problem,) = [p for p in report.problems if f"has model_type {kind!r}, which neither" in p.evidence]
    assert problem.severity == "fails" and "dies at the start" in problem.consequence


@pytest.mark.parametrize("name", SGLANG)
def test_a_drafter_that_no_conversion_helps(ask, name):
    """A speculators drafter whose residual starts normed: what would be refused is said at once."""
    report = ask(name, dialect="vllm")
    assert the(report, "SGLang has no norm_before_residual").severity == "fails"
    assert the(report, "no model_type").fix == "no conversion helps, see below"
    assert "eyas convert" in the(ask(name, dialect="vllm", norm_before_residual=False), "no model_type").fix


# Layer ids: place and convention by engine, version, class and runner


@pytest.mark.parametrize("name", SGLANG)
@pytest.mark.parametrize("target", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_output_ids_are_raised_by_one(ask, name, target):
    config = {**pairs.TARGET, "architectures": [target]}
    assert not bad(ask(name, config))


@pytest.mark.parametrize(("name", "captured"), [("sglang-0.5.9", [3, 5, 7]), ("sglang-0.5.23", [2, 4, 6])])
def test_deepseek_takes_two_conventions_in_recent_versions(ask, name, captured):
    """PR 25454: ids that do not begin with 1 are entry ids there."""
    config = {**pairs.TARGET, "architectures": ["DeepseekV3ForCausalLM"]}
    report = ask(name, config, eagle_config={IDS: [2, 4, 6]}, flags={"disable_cuda_graph": True})
    if captured == [3, 5, 7]:
        assert not bad(report)
    else:
        the(report, f"captures entry ids {captured}; the drafter listens to [3, 5, 7]", "deepseek_v2.py:3473")


def test_gpt_oss_takes_an_id_equal_to_its_depth_as_it_is(ask):
    config = {**pairs.TARGET, "architectures": ["GptOssForCausalLM"]}
    assert not bad(ask("sglang-0.5.23", config))
    depth = {"eagle_config": {IDS: [1, 4, 10]}}  # no output id is as high as there are layers
    assert not bad(ask("sglang-0.5.23", config, **depth))
    found = ask("sglang-0.5.9", config, **depth, flags={"disable_cuda_graph": True})
    assert [p.severity for p in bad(found)] == ["fails"]
    the(found, "gpt_oss.py:1132: entry id 11 is never entered by a target of 10 layers")
    assert not bad(ask("vllm-0.32.0", config, dialect="sglang", architectures=["Eagle3LlamaForCausalLM"], **depth))


@pytest.mark.parametrize(
    ("runner", "dialect", "captured"),
    [("0", "sglang", [1, 4, 6]), ("1", "sglang", None), ("0", "vllm", None), ("1", "vllm", None), ("0", "eagle", None)],
)
def test_the_two_runners_of_vllm_read_ids_in_different_places(ask, runner, dialect, captured):
    """V1 takes nested ids as they are, V2 does not see them and falls back to the default, which is right by luck."""
    report = ask("vllm-0.32.0", dialect=dialect, environment={"VLLM_USE_V2_MODEL_RUNNER": runner})
    if captured is None:
        assert not bad(report)
    else:
        the(report, f"captures entry ids {captured}; the drafter listens to [2, 5, 7]", "gpu_model_runner.py:5249")


def test_luck_runs_out_with_ids_that_are_not_the_default(ask):
    """gpt-oss drafters listen to output ids 1, 17, 33 of 36 layers: V2 captures 33 where 34 is meant."""
    config = {**pairs.TARGET, "num_hidden_layers": 36}
    environment = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    report = ask("vllm-0.32.0", config, "sglang", eagle_config={IDS: [1, 17, 34]}, environment=environment)
    the(report, "captures entry ids [2, 18, 33]; the drafter listens to [2, 18, 35]")


# Drafters


SPECULATORS_ONLY = (
    "speculators_model_type",
    "speculators_config",
    "transformer_layer_config",
    IDS,
    "target_hidden_size",
)
RENAMED = {
    **folders.SGLANG,
    **dict.fromkeys(SPECULATORS_ONLY, ...),
    "norm_before_residual": False,
}  # names of vLLM inside


@pytest.mark.parametrize("name", OLD)
def test_a_speculators_layer_is_dropped_by_older_sglang(ask, name):
    problem = the(ask(name, dialect="vllm", **RENAMED), "drops layers.0.hidden_norm.weight")
    assert problem.severity == "silent" and "model.midlayer" in problem.consequence
    assert ask("sglang-0.5.23", dialect="vllm", **RENAMED).fits


@pytest.mark.parametrize("name", SGLANG)
def test_a_size_of_nothing(ask, name):
    the(ask(name, target_hidden_size=None), "raises TypeError", "llama_eagle3.py")


@pytest.mark.parametrize("name", SGLANG)
def test_an_official_drafter_needs_another_name_in_sglang(ask, name):
    """sglang issue 36528: LlamaForCausalLM is a whole model there."""
    the(ask(name, dialect="eagle"), "LlamaForCausalLM has no hot_token_id")
    assert ask("vllm-0.32.0", dialect="eagle").fits


def test_four_states_at_the_top_level_are_three_to_vllm(ask):
    """vllm issue 54526: the llama drafter counts nested ids only, so fc is built for three states."""
    fc = pairs.zeros(pairs.H, 4 * pairs.H)
    problem = the(ask("vllm-0.32.0", **{IDS: [2, 4, 5, 7]}, tensors={"fc.weight": fc}), "fc.weight is [32, 128]")
    assert "model.fc.weight as [32, 96]" in problem.evidence
    assert ask("vllm-0.32.0", **{IDS: [2, 4, 5, 7]}, tensors={"fc.weight": fc}, num_aux_hidden_states=4).problems


def test_a_map_with_a_full_vocabulary_is_refused_by_vllm(ask):
    maps = {
        "d2t": pairs.torch.zeros(pairs.V, dtype=pairs.torch.int64),
        "t2d": pairs.torch.ones(pairs.V, dtype=pairs.torch.bool),
    }
    change = {"draft_vocab_size": pairs.V, "tensors": {"lm_head.weight": pairs.zeros(pairs.V, pairs.H), **maps}}
    the(ask("vllm-0.32.0", **change), "no module or parameter named 'draft_id_to_target_id'")
    assert ask("sglang-0.5.23", dialect="sglang", **change).fits


@pytest.mark.parametrize("name", SGLANG)
def test_positions_that_end_too_early(ask, name):
    problem = the(ask(name, max_position_embeddings=2048), "max_position_embeddings of the drafter is 2048")
    assert "to 4096" in problem.fix and "_derive_context_length" not in problem.evidence
    environment = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    assert ask(name, max_position_embeddings=2048, environment=environment).fits
    assert ask(name, max_position_embeddings=2048, flags={"context_length": 2048}).fits
    assert ask("vllm-0.32.0", max_position_embeddings=2048).fits  # raises it by itself


@pytest.mark.parametrize("name", OLD)
def test_rope_in_the_spelling_of_transformers_5(ask, name):
    change = {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    the(ask(name, **change), "reads RoPE theta 10000.0, the drafter was trained with 5000.0")
    assert ask("sglang-0.5.23", **change).fits


# Multimodal targets in vLLM


def test_the_image_token_under_another_name(ask):
    config = {**pairs.KIMI, "media_placeholder_token_id": ..., "image_token_id": 5}
    config = {k: v for k, v in config.items() if v is not ...}
    problem = the(ask("vllm-0.32.0", config), "reads media_placeholder_token_id")
    assert problem.severity == "fails" and "has image_token_id instead" in problem.evidence


# Flags


@pytest.mark.parametrize("name", SGLANG)
def test_trees_pages_and_backends(ask, name):
    tree = {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 16,
        "page_size": 64,
    }
    the(ask(name, flags={**tree, "attention_backend": "flashmla"}), "topk > 1 with page_size > 1")
    assert ask(name, flags={**tree, "attention_backend": "fa3"}).fits
    assert ask(name, flags={**tree, "page_size": 1, "attention_backend": "flashmla"}).fits
    found = ask(name, flags={**tree, "attention_backend": "triton"}).fits
    assert found is (name == "sglang-0.5.23")
    the(ask(name, flags={**tree, "page_size": 1, "attention_backend": "trtllm_mha"}), "only supports topk = 1")


@pytest.mark.parametrize("name", SGLANG)
def test_the_cap_of_48_requests(ask, name):
    said = [p for p in ask(name).problems if "reset to 48" in p.evidence]
    assert [p.severity for p in said] == ["note"] and "--max-running-requests" in said[0].consequence
    assert not [p for p in ask(name, flags={"max_running_requests": 128}).problems if "reset to 48" in p.evidence]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "eagle3"}, "num_speculative_tokens"),
        ({"method": "eagle3", "num_speculative_tokens": 3, "tensor_parallel_size": 2}, "not a valid argument"),
        ({"method": "eagle3", "num_speculative_tokens": 3, "topk": 4}, "topk is no field of SpeculativeConfig"),
        ({"method": "eagle", "num_speculative_tokens": 3}, "method is 'eagle'"),
        ({"method": "eagle3", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}, "synthetic"),
    ],
)
def test_the_speculative_config_of_vllm(ask, given, words):
    report = ask("vllm-0.32.0", flags={"speculative_config": given})
    assert any(words in p.evidence for p in bad(report)) and not report.fits


def test_a_speculative_config_that_is_fine(ask):
    given = {"method": "eagle3", "num_speculative_tokens": 3, "model": "x", "draft_tensor_parallel_size": 1}
    assert not bad(ask("vllm-0.32.0", flags={"speculative_config": given}))


# Every model of every engine


@cache
def rows(name: str) -> dict[str, Row]:
    return {row.architecture: row for row in matrix(engine(name))}


def of(name: str, status: str) -> set[str]:
    return {architecture for architecture, row in rows(name).items() if row.status == status}


@cache
def listing(name: str) -> Listing:
    folders = ["sglang/srt/models/"] if name in SGLANG else ["vllm/model_executor/models/", "vllm/models/"]
    return Listing(ZipFile(wheel(name)), folders)


NEEDED = {"set_eagle3_layers_to_capture", "get_embed_and_head"}
COUNTS = {"sglang-0.5.8": (154, 30), "sglang-0.5.9": (178, 38), "sglang-0.5.23": (290, 70)}
BY_CONFIG = {"DeepseekOCRForCausalLM", "DeepseekVL2ForCausalLM", "InternVLChatModel"}  # several inner models
AROUND = {"Sarashina2VisionForCausalLM"}  # hands self.llm.model to the embedding routine


@pytest.mark.parametrize("name", SGLANG)
def test_the_matrix_agrees_with_an_independent_listing(name):
    found = listing(name)
    architectures = found.entry_classes()
    assert set(rows(name)) == set(architectures) and len(architectures) == COUNTS[name][0]
    ready = {a for a, module in architectures.items() if found.methods(a, module) >= NEEDED}
    assert of(name, "ready") == ready and len(ready) == COUNTS[name][1]
    inner = {a: found.inner(a, module) for a, module in architectures.items() if a not in ready}
    holds = {a for a, models in inner.items() if models and all(found.methods(m) >= NEEDED for m in models)}
    assert holds - BY_CONFIG - AROUND <= of(name, "delegate")
    assert of(name, "undecided") >= BY_CONFIG and of(name, "cannot") >= AROUND


WRAPPERS = {
    "DotsOCRForCausalLM", "DotsVLMForCausalLM", "GlmAsrForConditionalGeneration", "InternS1ForConditionalGeneration",
    "KimiVLForConditionalGeneration", "LlavaLlamaForCausalLM", "LlavaMistralForCausalLM", "LlavaQwenForCausalLM",
    "LlavaVidForCausalLM", "MiDashengLMModel", "MiniCPMO", "MultiModalityCausalLM", "NVILAForConditionalGeneration",
    "NVILALiteForConditionalGeneration", "POINTSV15ChatModel", "Phi4MMForCausalLM", "PixtralForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration", "YiVLForCausalLM",
}  # fmt: skip
LATER = {"KimiK25ForConditionalGeneration", "LightOnOCRForConditionalGeneration", "StepVLForConditionalGeneration"}
LATEST = {
    "BailingMM2NativeForConditionalGeneration", "BailingMMNativeForConditionalGeneration",
    "LocateAnythingForConditionalGeneration", "Qwen3ASRForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
    "VoxtralForConditionalGeneration", "LightOnOCRForConditionalGeneration", "StepVLForConditionalGeneration",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "wrappers"),
    [("sglang-0.5.8", WRAPPERS), ("sglang-0.5.9", WRAPPERS | LATER), ("sglang-0.5.23", WRAPPERS | LATEST)],
)
def test_wrappers_that_only_have_to_forward(name, wrappers):
    assert of(name, "delegate") == wrappers


@pytest.mark.parametrize("name", SGLANG)
def test_what_is_dynamic_is_marked_as_such(name):
    rows_ = rows(name)
    assert {"LlavaForConditionalGeneration", "MiniCPMV", "TransformersForCausalLM"} <= of(name, "undecided")
    assert "__getattr__" in rows_["MiniCPMV"].reason
    assert (
        rows_["Qwen2MoeForCausalLM"].status == "cannot"
        and "no get_embed_and_head" in rows_["Qwen2MoeForCausalLM"].reason
    )
    assert all(row.reason for row in rows_.values() if row.status in ("undecided", "cannot"))


@pytest.mark.thorough
def test_the_matrix_of_vllm_agrees_with_an_independent_listing():
    name, found = "vllm-0.32.0", listing("vllm-0.32.0")
    text, multimodal = found.table("_TEXT_GENERATION_MODELS"), found.table("_MULTIMODAL_MODELS")
    borrowed = {**found.table("_TRANSFORMERS_SUPPORTED_MODELS"), **found.table("_TRANSFORMERS_BACKEND_MODELS")}
    listed = {**text, **multimodal, **borrowed}
    has = {a for a, cls in listed.items() if "SupportsEagle3" in found.bases(cls)}
    assert borrowed.keys() <= has and len(borrowed) == 32
    split = {a for a in has if rows(name)[a].reason.startswith("differs by platform")}
    hollow = {"CohereCompassForConditionalGeneration", "Exaone4_5_ForConditionalGeneration"}
    late = {"Qwen4ExpForConditionalGeneration", "Qwen4ExpForCausalLM"}
    assert has - split - hollow - late == {a for a in of(name, "ready") if a in listed}
    for architecture in hollow:  # they inherit the interface, around a model that captures nothing
        assert "must inherit from EagleModelMixin" in rows(name)[architecture].reason
    assert late <= of(name, "undecided") and len(multimodal) == 122 and len(text) == 118


def test_wrappers_of_vllm_that_only_have_to_forward():
    reported = {
        "KimiVLForConditionalGeneration", "Qwen2VLForConditionalGeneration", "Qwen2AudioForConditionalGeneration",
        "Qwen2_5OmniModel", "AudioFlamingo3ForConditionalGeneration", "BagelForConditionalGeneration",
        "DotsOCRForCausalLM", "FunAudioChatForConditionalGeneration", "GlmAsrForConditionalGeneration",
        "IsaacForConditionalGeneration", "KananaVForConditionalGeneration", "KeyeForConditionalGeneration",
        "KeyeVL1_5ForConditionalGeneration", "LlavaOnevision2ForConditionalGeneration", "Phi3VForCausalLM",
        "MossTranscribeDiarizeForConditionalGeneration", "PaddleOCRVLForConditionalGeneration", "Phi4ForCausalLMV",
    }  # fmt: skip
    assert reported <= of("vllm-0.32.0", "delegate")
    chosen = {
        "InternVLChatModel",
        "LlavaNextForConditionalGeneration",
        "UltravoxModel",
        "PaliGemmaForConditionalGeneration",
    }
    assert chosen <= of("vllm-0.32.0", "undecided")


# The cost of a check


@pytest.mark.parametrize("name", WHEELS)
def test_a_check_is_cheap(name, tmp_path):
    """Three seconds of the processor, which the machine's other work does not lengthen, and 300 MB."""
    target = pairs.target(tmp_path / "target", pairs.KIMI)
    drafter = pairs.drafter(tmp_path / "drafter", "vllm" if name.startswith("vllm") else "sglang")
    arguments = [
        str(target),
        "--drafter",
        str(drafter),
        "--engine",
        name.split("-")[0],
        "--engine-path",
        str(wheel(name)),
    ]
    code = (
        "import atexit, pathlib, sys, time; from eyas.cli.main import main; "
        "peak = lambda: pathlib.Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]; "
        "atexit.register(lambda: print(time.process_time(), peak(), file=sys.stderr)); "
        f"main(['check', *{arguments!r}, '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1) and json.loads(done.stdout)["engine"].startswith(name.replace("-", " "))
    seconds, kilobytes = done.stderr.split()
    assert float(seconds) < 3 and int(kilobytes) < 300_000
