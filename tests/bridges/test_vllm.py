"""vLLM in miniature: interfaces, registry tables, wrappers, runners, and a loader that refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bridges import pairs
from bridges.engines import VLLM, edited, write
from bridges.wheels import engine
from drafter import folders

from eyas.bridges.check import check
from eyas.bridges.code.source import open_engine
from eyas.bridges.flags import Given
from eyas.bridges.matrix import matrix
from eyas.bridges.report import Problem, Report
from eyas.bridges.vllm.launch import arguments
from eyas.core import UsageError

IDS = "eagle_aux_hidden_state_layer_ids"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"
KEPT = ("fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d")
OTHERS = tuple(n for n in folders.weights("vllm") if n not in KEPT)  # the miniature has one projection for a layer
Q = {"layers.0.q_proj.weight": pairs.zeros(32, 64)}
WRAPPED = {"text_config": pairs.TARGET, "image_token_id": 3}


@pytest.fixture
def ask(tmp_path: Path):
    def run(files: dict[str, str] | None = None, dialect: str = "vllm", target: Any = None, **drafter: Any) -> Report:
        source = open_engine("vllm", write(tmp_path / "engine", files or VLLM))
        folder = pairs.target(tmp_path / "target", **(target or {}))
        changes = {"without": OTHERS, **drafter, "tensors": Q | drafter.get("tensors", {})}
        return check(folder, pairs.drafter(tmp_path / "drafter", dialect, **changes), source, {}, {})

    return run


def of_engine(report: Report) -> list[Problem]:
    """Without what Eyas itself finds odd about a drafter of one projection."""
    odd = ("/drafter", "more problems")
    return [p for p in report.problems if p.severity != "note" and not any(word in p.evidence for word in odd)]


def the(report: Report, *words: str) -> Problem:
    found = [p for p in of_engine(report) if all(w in f"{p.evidence} {p.consequence} {p.fix}" for w in words)]
    assert len(found) == 1, report.problems
    return found[0]


def test_a_pair_that_fits(ask):
    assert not of_engine(ask())
    assert not of_engine(ask(**{IDS: [1, 5, 9]}))  # entry ids, as they are


def test_a_name_that_is_completed(ask):
    names = {"without": tuple(n for n in folders.weights("eagle") if n not in KEPT)}
    assert not of_engine(ask(dialect="eagle", **names))
    the(ask(dialect="eagle", **names, architectures=["BertModel"]), "architecture Eagle3BertModel, and registers none")


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        (
            "SilentForConditionalGeneration",
            ("Silent lacks", "raises RuntimeError", "LlamaForCausalLM in self.language_model"),
        ),
        ("HollowForConditionalGeneration", ("raises AssertionError: it must inherit from EagleModelMixin",)),
        ("ChosenForConditionalGeneration", ("Chosen lacks", "chosen at run time")),
        ("NobodyForCausalLM", ("registers none such",)),
    ],
)
def test_targets_that_cannot(ask, architecture, words):
    inner = {k: v for k, v in pairs.TARGET.items() if k != "architectures"}
    report = ask(target={"text_config": inner, "architectures": [architecture], "image_token_index": 3})
    assert the(report, *words).severity == "fails" and not report.fits


def test_an_inner_model_named_by_its_own_config(ask):
    files = edited(
        VLLM, "vllm/model_executor/models/wrappers.py", "class Chosen(Silent):", "class Chosen(Silent, SupportsEagle3):"
    )
    report = ask(files, target={**WRAPPED, "architectures": ["ChosenForConditionalGeneration"], "image_token_index": 3})
    assert not of_engine(report)


def test_a_wrapper_that_supports_it(ask):
    assert not of_engine(ask(target={**WRAPPED, "architectures": ["ReadyForConditionalGeneration"]}))
    report = ask(
        target={**WRAPPED, "architectures": ["ReadyForConditionalGeneration"], "image_token_id": ..., "image_token": 3}
    )
    assert (
        "reads image_token_id of the target's config, which has image_token instead"
        in the(report, "image_token").evidence
    )


def test_a_model_that_differs_by_platform(ask):
    report = ask(target={"architectures": ["SplitForCausalLM"]})
    assert the(report, "SplitForCausalLM lacks").severity == "fails"
    assert next(f.value for f in report.facts if f.name == "target class").endswith("by platform")


def test_a_runner_that_adds_one(ask):
    files = edited(
        VLLM, RUNNER, "return tuple(ids) if ids else None", "return tuple(i + 1 for i in ids) if ids else None"
    )
    the(ask(files), "captures entry ids [3, 6, 8]; the drafter listens to [2, 5, 7]")
    assert not of_engine(ask(files, **{IDS: ...}))


def test_a_runner_that_does_not_look(ask):
    files = edited(VLLM, RUNNER, "layers = self._layers() or", "layers =")
    assert not of_engine(ask(files))
    the(ask(files, **{IDS: [1, 5, 7]}), "captures entry ids [2, 5, 7]; the drafter listens to [1, 5, 7]")


def test_two_runners(ask, tmp_path):
    second = """
        from vllm.model_executor.models.interfaces import supports_eagle3

        def setup(model, spec_config):
            if not supports_eagle3(model):
                raise RuntimeError("no")
            model.set_aux_hidden_state_layers(model.get_eagle3_default_aux_hidden_state_layers())
        """
    files = {**VLLM, "vllm/v1/worker/gpu/spec_decode/eagle.py": second}
    assert the(ask(files, **{IDS: [1, 5, 7]}), "captures entry ids [2, 5, 7]", "V2 model runner").severity == "silent"
    folders_ = tmp_path / "target", tmp_path / "drafter"
    source = open_engine("vllm", tmp_path / "engine")
    assert not of_engine(check(*folders_, source, {}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"tensors": {"model.norm.weight": pairs.zeros(32)}},
            "no module or parameter named 'model.norm.weight' in Model",
        ),
        ({"tensors": {"fc.weight": pairs.zeros(32, 128)}}, "model.fc.weight as [32, 96]"),
        ({"without": (*OTHERS, "d2t")}, "fills draft_id_to_target_id"),
        ({"draft_vocab_size": pairs.V}, "no module or parameter named 'draft_id_to_target_id'"),
        ({"without": (*OTHERS, "fc.weight")}, "fills model.fc.weight"),
        ({"speculators_model_type": "eagle9"}, "'eagle9' is none that vllm 0.40.1 knows"),
        ({"norm_output": True}, "norm_output is true"),
    ],
)
def test_a_drafter_that_does_not_fit(ask, change, words):
    report = ask(**change)
    assert any(words in p.evidence for p in of_engine(report)) and not report.fits


def test_a_kind_of_layer_that_the_reader_refuses(ask):
    inner = {**folders.SPECULATORS["transformer_layer_config"], "model_type": "qwen3"}
    the(ask(transformer_layer_config=inner), "raises ValueError: Unsupported model_type")


def test_the_matrix(tmp_path):
    rows = {row.architecture: row for row in matrix(open_engine("vllm", write(tmp_path, VLLM)))}
    assert {name: row.status for name, row in rows.items()} == {
        "LlamaForCausalLM": "ready",
        "SplitForCausalLM": "undecided",
        "LazyForCausalLM": "undecided",
        "SilentForConditionalGeneration": "delegate",
        "ChosenForConditionalGeneration": "undecided",
        "ReadyForConditionalGeneration": "ready",
        "HollowForConditionalGeneration": "cannot",
        "Eagle3LlamaForCausalLM": "cannot",
        "LlamaForCausalLMEagle3": "cannot",
    }
    assert rows["SplitForCausalLM"].reason == "differs by platform: cannot or ready"
    assert rows["SilentForConditionalGeneration"].inner == "LlamaForCausalLM"


# vLLM as published


@pytest.fixture
def published(tmp_path: Path):
    def run(target: Any = None, flags: Any = None, environment: Any = None, **drafter: Any) -> Report:
        folder = pairs.target(tmp_path / "target", target)
        made = pairs.drafter(tmp_path / "drafter", drafter.pop("dialect", "vllm"), **drafter)
        return check(folder, made, engine("vllm-0.32.0"), flags or {}, environment or {})

    return run


def alarms(report: Report) -> list[Problem]:
    return [p for p in report.problems if p.severity != "note"]


def architecture(name: str, **more: Any) -> dict[str, Any]:
    return {**pairs.TARGET, "architectures": [name], "model_type": "x", **more}


RUNNERS = pytest.mark.parametrize("runner", ["0", "1"])
VISION = {
    "text_config": pairs.TARGET,
    "vision_config": {"model_type": "vision"},
    "image_token_id": 3,
    "image_token_index": 3,
}


@RUNNERS
@pytest.mark.parametrize("name", ["Olmo2ForCausalLM", "SmolLM3ForCausalLM", "FlexOlmoForCausalLM"])
def test_targets_on_transformers_own_modules(published, name, runner):
    """transformers/base.py: the table of layers is filled while the model is built; outputs of layers are recorded."""
    environment = {"VLLM_USE_V2_MODEL_RUNNER": runner}
    assert not alarms(published(architecture(name), environment=environment))
    assert not alarms(published(architecture(name), environment=environment, **{IDS: [1, 5, 10]}))
    (problem,) = alarms(published(architecture(name), environment=environment, **{IDS: [0, 4, 6]}))
    assert "entry id 0 is the output of layer -1" in problem.evidence and problem.severity == "fails"
    other_ids(published(architecture(name), environment=environment, dialect="sglang"), runner, "base.py:841")


def other_ids(report: Report, runner: str, where: str) -> None:
    """V1 takes nested output ids for entry ids; V2 does not see them, and its default is right."""
    found = [
        f"captures entry ids {[1, 4, 6]}; the drafter listens to {[2, 5, 7]}" in p.evidence for p in alarms(report)
    ]
    assert found == ([True] if runner == "0" else []) and all(where in p.evidence for p in alarms(report))


def test_a_target_that_vllm_does_not_register(published):
    (problem,) = alarms(published(architecture("NewForCausalLM")))
    assert problem.severity == "undecided" and "(TransformersForCausalLM)" in problem.evidence
    (problem,) = alarms(published(architecture("NewMoeForCausalLM", num_experts=4)))
    assert "(TransformersMoEForCausalLM)" in problem.evidence
    (problem,) = alarms(published({**VISION, "architectures": ["NewVL"]}))
    assert "(TransformersMultiModalForCausalLM)" in problem.evidence
    (problem,) = alarms(published(architecture("NewForCausalLM"), {"model_impl": "vllm"}))
    assert problem.severity == "fails" and "registers none such" in problem.evidence
    report = published(architecture("Qwen2ForCausalLM"), {"model_impl": "transformers"})
    assert not alarms(report) and any("TransformersForCausalLM" in f.value for f in report.facts)


@RUNNERS
@pytest.mark.parametrize(
    "target",
    [
        *map(architecture, ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM")),
        {**VISION, "architectures": ["Qwen3VLForConditionalGeneration"]},
        {**VISION, "architectures": ["Qwen2_5_VLForConditionalGeneration"]},
        {**VISION, "architectures": ["Llama4ForConditionalGeneration"]},
    ],
    ids=lambda target: target["architectures"][0],
)
def test_the_default_layers_of_targets_that_ask_for_their_text_config(published, target, runner):
    environment = {"VLLM_USE_V2_MODEL_RUNNER": runner}
    assert not alarms(published(target, environment=environment, **{IDS: ...}))
    other_ids(published(target, environment=environment, dialect="sglang"), runner, "captures")


def test_rope_under_an_older_name(published):
    """SpecForge's drafters for Qwen2.5-VL: vLLM takes mrope for default, and refuses it without its sections."""
    inner = folders.SPECULATORS["transformer_layer_config"]

    def roped(**scaling: Any) -> list[Problem]:
        return alarms(published(transformer_layer_config={**inner, "rope_scaling": scaling}))

    assert not roped(type="mrope", mrope_section=[1, 1, 2])
    (problem,) = [p for p in roped(type="mrope") if p.severity == "fails"]
    assert "Legacy rope_type 'mrope' requires" in problem.evidence and problem.consequence == "dies at the start"
    assert not roped(type="linear", factor=2.0)


@pytest.mark.parametrize("named", [[None], [3], [["x"]], -1, "x"])
def test_an_architecture_that_is_no_name(published, named):
    report = published(architectures=named, speculators_model_type=..., model_type="llama")
    assert not report.fits and all(p.evidence and p.fix for p in report.problems if p.severity == "fails")


def test_a_drafter_without_a_theta(published):
    inner = {**folders.SPECULATORS["transformer_layer_config"], "rope_theta": None}
    found = published(transformer_layer_config=inner).problems
    assert not any("RoPE theta" in p.evidence for p in found)  # what transformers makes of it is not known here


@pytest.mark.parametrize("depth", [10**8, 10**30])
def test_a_depth_that_nobody_could_load(published, depth):
    report = published({**pairs.TARGET, "num_hidden_layers": depth}, **{IDS: ...})
    assert "undecided" in {p.severity for p in report.problems}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rejection_sample_method": "strict"}, '"standard" or "synthetic" or "block"'),
        ({"draft_sample_method": 3}, '"greedy" or "probabilistic"'),
        ({"draft_tensor_parallel_size": 0}, "takes at least 1"),
        ({"draft_tensor_parallel_size": 3}, "cannot be other value than 1 or target model"),
        ({"num_speculative_tokens": 0}, "takes more than 0"),
        ({1: 2}, "1 is no field"),
    ],
)
def test_values_that_the_speculative_config_does_not_take(published, given, words):
    config = {"method": "eagle3", "num_speculative_tokens": 3, **given}
    (problem,) = alarms(published(flags={"speculative_config": config}))
    assert problem.severity == "fails" and words in problem.evidence


def test_a_file_with_a_key_that_is_no_name():
    with pytest.raises(UsageError, match="speculative-config in the file has the key 1, which is not a name"):
        arguments(Path("t"), Path("d"), Given((), {"speculative_config": {1: 2}}))


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({"rejection_sample_method": "block", "draft_sample_method": "probabilistic"}, {}),
        ({"draft_tensor_parallel_size": 2}, {"tensor_parallel_size": 2}),
        ({"draft_tensor_parallel_size": 1}, {"tp": 8}),
        ({"quantization": None, "max_model_len": 4096, "attention_backend": "FLASH_ATTN"}, {}),
    ],
)
def test_values_that_it_does(published, given, flags):
    config = {"method": "eagle3", "num_speculative_tokens": 3, **given}
    assert not alarms(published(flags={"speculative_config": config, **flags}))
