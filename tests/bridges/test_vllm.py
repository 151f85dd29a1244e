"""vLLM in miniature: interfaces, registry tables, wrappers, runners, and a loader that refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bridges import pairs
from bridges.engines import VLLM, edited, write
from drafter import folders

from eyas.bridges.check import check
from eyas.bridges.code.source import open_engine
from eyas.bridges.matrix import matrix
from eyas.bridges.report import Problem, Report

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
