"""The plugin in vLLM as installed: real entry points, real classes, the real code of both model runners."""

from __future__ import annotations

import pytest

from plugin import environments, models

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

MEMBERS = {
    "set_aux_hidden_state_layers",
    "get_eagle3_default_aux_hidden_state_layers",
    "supports_eagle3",
    "has_own_lm_head",
    "has_own_embed_tokens",
}
WANTED = [i + 1 for i in models.IDS]


def test_wrappers_of_vllm(tmp_path):
    """Without the plugin vLLM's own error, once everything is loaded; with it the drafter's layers, or the reason."""
    python = environments.vllm()
    configs = {
        "before": (models.KIMI_VL, "-"),
        "named": ({**models.KIMI_VL, "media_placeholder_token_id": 92}, "KimiVLForConditionalGeneration"),
        "auto": (models.QWEN2_AUDIO, "auto"),
        "cannot": (models.PALIGEMMA, "auto"),
    }
    cases = [a for name, (c, asked) in configs.items() for a in (models.write(tmp_path / name, c), asked)]
    drafter = models.write(tmp_path / "drafter", models.VLLM_DRAFTER)
    before, named, auto, cannot = environments.run(
        python,
        "in_vllm.py",
        drafter,
        *cases,
        path=[environments.installed(tmp_path / "site")],
        EYAS_PLUGIN_MARKERS=str(tmp_path / "markers"),
        VLLM_CACHE_ROOT=str(tmp_path / "cache"),
    )
    assert before["v1"] == (
        "RuntimeError: Model does not support EAGLE3 interface but aux_hidden_state_outputs was requested"
    )
    assert before["v2"] == "RuntimeError: Model does not support EAGLE3 interface"
    assert before["image_token_index"] is None  # the proposer reads it, and would die of it

    for said, token in ((named, 92), (auto, 91)):
        assert said["construct"] == "" and said["v1"] == said["v2"] == WANTED
        assert said["image_token_index"] == token
        assert said["embedding"][1] == said["head"][1] == 32

    reason = cannot["construct"]
    assert reason.startswith("CannotServeEagle3: eyas-plugin: PaliGemmaForConditionalGeneration cannot be a target")
    assert "nothing inside it has set_aux_hidden_state_layers" in reason and "GemmaForCausalLM" in reason

    (marker,) = environments.markers(tmp_path / "markers")
    assert marker["engine"] == "vllm" and marker["version"].startswith("0.") and marker["pid"] > 1
    classes = marker["classes"]
    assert {name: entry.get("through") for name, entry in classes.items()} == {
        "KimiVLForConditionalGeneration": "language_model: DeepseekV2ForCausalLM",
        "Qwen2AudioForConditionalGeneration": "language_model: Qwen2ForCausalLM",
        "PaliGemmaForConditionalGeneration": None,
    }
    assert all(set(entry["added"]) == MEMBERS for entry in classes.values())
    assert {"DeepseekV2ForCausalLM", "Qwen2ForCausalLM"} <= set(marker["left_alone"])
    assert marker["refused"] in reason
