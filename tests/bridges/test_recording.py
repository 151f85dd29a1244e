"""An engine started for one traced answer: what is asked of it, what it leaves, and every way of not answering.

It is a miniature one, in whose entry point a server stands (launching.SERVER).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from bridges import pairs
from bridges.launching import CALLS, REPLY, SERVER, engine

from eyas.bridges import holders, recording
from eyas.bridges.launch import Asked
from eyas.bridges.recording import record
from eyas.core import EyasError


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = engine(tmp_path / "engine", "sglang", SERVER)
    for name, value in (("PYTHONPATH", folder), ("HERE", tmp_path), ("EYAS_CACHE", tmp_path / "cache")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("EYAS_PLUGIN", raising=False)
    monkeypatch.setattr(holders, "_SMI", "no-nvidia-smi")
    model, drafter = pairs.target(tmp_path / "model"), pairs.drafter(tmp_path / "drafter", "sglang")

    def run(prompt: list[int], reply: Any = REPLY, *arguments: str, status: int = 200, tail: str = "") -> Any:
        (tmp_path / "reply").write_text(json.dumps([status, reply]))
        (tmp_path / "lines").write_text("".join(json.dumps(call) + "\n" for call in CALLS) + tail)
        asked = Asked("sglang", str(model), drafter, arguments)
        try:
            return record(asked, prompt, lambda what, done: None, lambda text: None)
        finally:
            assert (tmp_path / "said").exists(), "it was not asked"
            said = json.loads((tmp_path / "said").read_text())
            run.said = said  # type: ignore[attr-defined]
            assert not psutil.pid_exists(said["pid"])
            assert not list((tmp_path / "cache" / "launches").iterdir()), "a trace was left behind"

    return run


def test_one_answer_is_traced(ask):
    """The engine is ended while it drafts on: what it had not finished writing is left out."""
    trace = ask([5, 6], REPLY, "--api-key", "mine", tail='{"call": "forw')
    assert trace.tokens == [5, 6, 7, 8, 9] and trace.prompt == 2 and trace.dtype == "bfloat16"
    (step,) = trace.steps
    assert [row.token for row in step.rows] == [6, 7] and step.rows[1].top == ((8, 2.0), (9, 1.0))
    assert ask.said["mode"] == 0o700 and ask.said["key"] == "Bearer mine"
    sampling = ask.said["asked"]["sampling_params"]
    assert (sampling["temperature"], sampling["max_new_tokens"]) == (0, recording.TOKENS)


def test_of_a_long_prompt_the_beginning(ask):
    trace = ask(list(range(2000)))
    assert ask.said["asked"]["input_ids"] == list(range(recording.PROMPT)) == trace.tokens[: trace.prompt]


@pytest.mark.parametrize(
    ("status", "reply", "says"),
    [
        (400, {"error": "too long"}, r"did not answer: http://127\.0\.0\.1:\d+/generate says 400: .*too long"),
        (200, {"output_ids": None}, "did not answer: TypeError"),
        (200, {}, "did not answer: KeyError"),
        (0, None, "did not answer: (RemoteProtocolError|ReadError)"),
    ],
)
def test_no_answer(ask, status, reply, says):
    """The engine is ended then too, and nobody waits for it."""
    with pytest.raises(EyasError, match=says):
        ask([5, 6], reply, status=status)
