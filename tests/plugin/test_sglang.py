"""The plugin on SGLang's classes as published, with the transformers that each version pins; kernels stand in."""

from __future__ import annotations

import pytest

from plugin import environments, models

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

ADDED = ["set_eagle3_layers_to_capture", "get_embed_and_head", "set_embed_and_head"]
CHOSEN, DEFAULT = [i + 1 for i in models.IDS], [2, 5, 7]  # entry ids


def run(version: str, tmp_path, config, module: str, **variables: str):
    python = environments.sglang(version)
    source = environments.sglang_source(version, tmp_path / "sglang")
    (said,) = environments.run(
        python,
        "in_sglang.py",
        models.write(tmp_path / "drafter", models.SGLANG_DRAFTER),
        models.write(tmp_path / "target", config),
        f"sglang.srt.models.{module}",
        config["architectures"][0],
        path=[source, environments.installed(tmp_path / "site")],
        EYAS_PLUGIN_MARKERS=str(tmp_path / "markers"),
        **variables,
    )
    (marker,) = environments.markers(tmp_path / "markers")
    assert (marker["engine"], marker["version"], marker["refused"]) == ("sglang", version, "")
    return said["before"], said["after"], marker["classes"][config["architectures"][0]]


def test_the_founding_case(tmp_path):
    """0.5.9 has no plugins: it comes in through the registry of models, which SGLang imports when it needs a class."""
    before, after, done = run(
        "0.5.9",
        tmp_path,
        models.KIMI_K25,
        "kimi_k25",
        EYAS_PLUGIN="KimiK25ForConditionalGeneration",
        SGLANG_EXTERNAL_MODEL_PACKAGE="eyas_plugin.external",
    )
    lacks = "AttributeError: 'KimiK25ForConditionalGeneration' object has no attribute"
    assert before["graphs"] == before["runner"] == f"{lacks} 'set_eagle3_layers_to_capture'"
    assert before["worker"] == f"{lacks} 'get_embed_and_head'"
    # Graphs are captured with the drafter's layers too, where this version says none (pull request 22836).
    assert after == {"graphs": CHOSEN, "runner": CHOSEN, "default": DEFAULT, "worker": [[128, 32], [128, 32]]}
    assert done == {
        "added": ADDED,
        "repaired": ["the drafter's layers at graph capture"],
        "through": "language_model: DeepseekV3ForCausalLM",
    }


def test_a_version_with_plugins(tmp_path):
    """0.5.23 loads entry points, and names the layers before graphs are captured: nothing to repair."""
    before, after, done = run("0.5.23", tmp_path, models.QWEN2_AUDIO, "qwen2_audio", EYAS_PLUGIN="auto")
    name = "Qwen2AudioForConditionalGeneration"
    assert before["worker"] == f"AttributeError: '{name}' object has no attribute 'get_embed_and_head'"
    assert before["runner"].startswith(f"ValueError: Model {name} does not implement set_eagle3_layers_to_capture")
    assert after == {"worker": [[128, 32], [128, 32]], "runner": CHOSEN}
    assert done == {"added": ADDED, "repaired": [], "through": "language_model: Qwen2ForCausalLM"}
