"""The trace of a drafter in the engines' real classes: what was computed, and nothing is computed otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plugin import environments, models

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

LLAMA = {**models.TEXT, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
HALF = {"draft_vocab_size": 48}  # of 96: token i is 2 i


def calls(folder: Path) -> list[dict[str, Any]]:
    assert not folder.exists(), "something was written behind the end"
    (file,) = Path(f"{folder}-kept").glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def agrees(said: dict[str, Any], lines: list[dict[str, Any]], engine: str) -> None:
    """The norms that every sketch begins with are those of what the class computed by itself."""
    assert said["same"], "tracing changed what was computed"
    drafter, fuse, forward, logits = lines  # of one draft: the plain one before, and the one behind, left nothing
    assert [line["call"] for line in lines] == ["drafter", "fuse", "forward", "logits"]
    assert (drafter["engine"], drafter["class"], drafter["dtype"]) == (engine, said["class"], "float32")
    assert drafter["config"]["rms_norm_eps"] == 1e-5
    assert forward["tokens"] == [3, 1, 4, 1, 5] and forward["positions"] == [7, 8, 9, 10, 11]
    by_layer = [[sketch[0] for sketch in column] for column in zip(*fuse["states"], strict=True)]
    for found, right in zip(by_layer, said["norms"].pop("states"), strict=True):
        assert found == pytest.approx(right, rel=1e-4)
    for name, right in said["norms"].items():
        assert [sketch[0] for sketch in forward[name]] == pytest.approx(right, rel=1e-4), name
    assert all(len(sketch) == 17 for name in ("entering", "embedding", "normed") for sketch in forward[name])
    (top,) = logits["top"]
    assert [token for token, _ in top] == [token for token, _ in said["top"]]
    assert all(token % 2 == 0 for token, _ in top)  # the target's ids, not the drafter's
    assert [value for _, value in top] == pytest.approx([value for _, value in said["top"]], rel=1e-4)


def test_vllm(tmp_path):
    folder = tmp_path / "calls"
    (said,) = environments.run(
        environments.vllm(),
        "in_vllm_trace.py",
        models.write(tmp_path / "target", LLAMA),
        models.write(tmp_path / "drafter", {**models.VLLM_DRAFTER, **HALF}),
        folder,
        path=[environments.installed(tmp_path / "site")],
        EYAS_PLUGIN_TRACE=str(folder),
        VLLM_CACHE_ROOT=str(tmp_path / "cache"),
    )
    lines = calls(folder)
    agrees(said, lines, "vllm")
    (asked,) = lines[-1]["normed"]
    assert asked == pytest.approx(lines[2]["normed"][-1], rel=1e-4, abs=1e-5)  # logits were asked for at the last row


@pytest.mark.parametrize("version", ["0.5.9", "0.5.23"])
def test_sglang(tmp_path, version):
    folder = tmp_path / "calls"
    python = environments.sglang(version)
    (said,) = environments.run(
        python,
        "in_sglang_trace.py",
        models.write(tmp_path / "target", LLAMA),
        models.write(tmp_path / "drafter", {**models.SGLANG_DRAFTER, **HALF}),
        folder,
        path=[environments.sglang_source(version, tmp_path / "sglang"), environments.installed(tmp_path / "site")],
        EYAS_PLUGIN_TRACE=str(folder),
        **({} if version == "0.5.23" else {"SGLANG_EXTERNAL_MODEL_PACKAGE": "eyas_plugin.external"}),
    )
    agrees(said, calls(folder), "sglang")
