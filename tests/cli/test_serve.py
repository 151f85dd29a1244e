"""``eyas serve``: its flags, and the whole of it once, as a process of its own."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from eyas.cli.serve import log_to_stderr
from eyas.core import DraftShape
from eyas.server.settings import MIB, Settings

PATIENCE = 120


@pytest.fixture(autouse=True)
def loggers():
    """As they were: serving sets them up for the whole process."""
    found = [logging.getLogger(name) for name in ("eyas", "uvicorn")]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in found]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.level, logger.propagate = handlers, level, propagate


@pytest.fixture
def served(monkeypatch) -> list[Any]:
    """What would be served: (load, settings)."""
    calls: list[Any] = []
    monkeypatch.setattr("eyas.server.lifecycle.serve", lambda load, settings: calls.append((load, settings)))
    monkeypatch.delenv("EYAS_API_KEY", raising=False)
    return calls


def test_defaults(eyas, target, served):
    ran = eyas("serve", target)
    assert ran.code == 0 and ran.out == ""
    ((load, settings),) = served
    assert settings == Settings(model_name=str(target))
    assert (settings.host, settings.port, settings.local, settings.api_key) == ("127.0.0.1", 30000, True, None)
    llm = load()
    assert llm.drafter is None and llm.engine.scheduler.max_running == 32


def test_every_flag_arrives(eyas, target, drafter, served, monkeypatch):
    monkeypatch.setenv("EYAS_API_KEY", "from the environment")
    args = ["--model-path", target, "--speculative-draft-model-path", drafter, "--served-model-name", "mine"]
    args += ["--host", "0.0.0.0", "--port", 8000, "--max-running-requests", 3, "--max-queued-requests", 7]
    args += ["--max-body-mib", 2, "--drain-timeout", 1.5, "--sampling-defaults", "openai", "--log-level", "error"]
    args += ["--speculative-num-steps", 3, "--speculative-eagle-topk", 2, "--speculative-num-draft-tokens", 6]
    args += ["--context-length", 64, "--chunked-prefill-size", 16, "--kv-cache-gib", 0.1]
    ran = eyas("serve", *args)
    assert ran.code == 0 and "note" not in ran.err
    ((load, settings),) = served
    assert settings == Settings(
        "mine", "0.0.0.0", 8000, "from the environment", 7, 2 * MIB, drain_timeout=1.5, model_defaults=False
    )
    llm = load()
    assert llm.drafter is not None and llm.engine.shape == DraftShape(3, 2, 6) and llm.context_length == 64
    assert llm.engine.scheduler.max_running == 3 and llm.engine.scheduler.chunk == 16
    assert eyas("serve", target, "--api-key", "mine", "--speculation", "off").code == 0
    assert served[1][1].api_key == "mine" and served[1][0]().drafter is None


@pytest.mark.parametrize("level, least", [("debug", "WARNING"), ("error", "ERROR"), ("critical", "CRITICAL")])
def test_the_log_says_no_more_than_was_asked_for(level, least):
    log_to_stderr(level)
    levels = [logging.getLevelName(logging.getLogger(name).level) for name in ("eyas", "uvicorn")]
    assert levels == [level.upper(), least]


def test_an_open_door_is_noted(eyas, target, served):
    assert "note: listening on 0.0.0.0 without --api-key" in eyas("serve", target, "--host", "0.0.0.0").err
    for args in (["--host", "::1"], ["--host", "localhost"], ["--host", "0.0.0.0", "--api-key", "k"]):
        assert "listening" not in eyas("serve", target, *args).err


@pytest.mark.parametrize(
    "args, words",
    [
        ([], "--model-path"),
        (["x", "--model-path", "y"], "--model-path"),
        (["x", "--port", "70000"], "--port"),
        (["x", "--log-level", "loud"], "--log-level"),
        (["x", "--max-running-requests", "0"], "--max-running-requests"),
        (["x", "--max-queued-requests", "-1"], "--max-queued-requests"),
        (["x", "--max-body-mib", "0"], "--max-body-mib"),
        (["x", "--drain-timeout", "-1"], "--drain-timeout"),
        (["x", "--api-key", " "], "--api-key"),
        (["x", "--api-key", "k\n"], "--api-key"),
        (["x", "--served-model-name", ""], "--served-model-name"),
        (["x", "--sampling-defaults", "mine"], "--sampling-defaults"),
        (["x", "--speculative-num-steps", "0"], "num_steps"),
    ],
    ids=str,
)
def test_flags_that_make_no_sense(eyas, served, args, words):
    eyas("serve", *args).failed(2, words)
    assert not served


@pytest.mark.parametrize(
    "args, words", [(["--speculation", "maybe"], "off, fixed or auto"), (["--kv-cache-gib", "0"], "kv_")]
)
def test_flags_that_make_no_sense_to_the_engine(eyas, target, args, words):
    """For real: the port is open by then."""
    eyas("serve", target, "--port", 0, "--drafter", "none", "--log-level", "error", *args).failed(2, words)


def test_the_port_need_not_wait_for_torch():
    code = (
        "import sys, eyas.cli.main, eyas.server.lifecycle; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_target_that_is_not_there_ends_it(eyas, tmp_path):
    """For real: the port opens, loading fails, and that is the error."""
    ran = eyas("serve", f"{tmp_path}/nothing", "--port", 0, "--drafter", "none", "--log-level", "error")
    ran.failed(ran.code, "nothing")
    assert ran.code in (1, 2)


class Process:
    """``eyas serve`` as a process of its own, its log read as it comes."""

    def __init__(self, *args: object):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "eyas", "serve", *map(str, args)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def said(self, pattern: str) -> re.Match[str]:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for line in self.lines:
                if found := re.search(pattern, line):
                    return found
            assert self.process.poll() is None, self.lines
            time.sleep(0.02)
        raise AssertionError(f"never said {pattern!r}: {self.lines}")


def test_the_whole_of_it(target: Path, drafter: Path):
    server = Process(target, "--drafter", drafter, "--port", 0, "--served-model-name", "m", "--context-length", 128)
    try:
        url = server.said(r"listening url=(http://127\.0\.0\.1:\d+)$")[1]
        with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
            statuses = set()
            end = time.monotonic() + PATIENCE
            while (status := client.get("/health").status_code) != 200:
                statuses.add(status)
                assert time.monotonic() < end
            assert statuses <= {503}
            server.said("The server is fired up and ready to roll!$")
            asked = {"model": "m", "messages": [{"role": "user", "content": "w5 w9 w77"}], "max_tokens": 100}
            with client.stream("POST", "/v1/chat/completions", json={**asked, "stream": True}) as reply:
                lines = reply.iter_lines()
                next(lines)
                server.process.send_signal(signal.SIGTERM)
                assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(PATIENCE) == 0
        assert not [line for line in server.lines if "w77" in line or "Traceback" in line]
        assert re.search(
            r"INFO request id=\w+ method=POST endpoint=/v1/chat/completions status=200 ", "\n".join(server.lines)
        )
    finally:
        server.process.kill()
        server.process.wait()
