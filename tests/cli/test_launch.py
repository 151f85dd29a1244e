"""``eyas launch`` as one runs it: checked, converted, started, followed to its end; engines are acted by a script."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from bridges import actor, pairs
from bridges.launching import engine

from eyas.bridges import following, holders
from eyas.bridges.holders import free_port

WRAPPED = {"architectures": ["WrapperForConditionalGeneration"], "text_config": pairs.TARGET}


@pytest.fixture
def launch(eyas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the verb on a pair that fits, unless told otherwise; whatever it was, nothing of it is left."""
    for name in ("EYAS_PLUGIN", "SGLANG_PLUGINS", "VLLM_PLUGINS", "SGLANG_EXTERNAL_MODEL_PACKAGE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("EYAS_CACHE", tmp_path / "cache"), ("PIDS", tmp_path), ("COLUMNS", 400)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(holders, "_SMI", "no-nvidia-smi")
    monkeypatch.setattr(following, "_GRACE", 0.5)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored

    def run(acts: str, *arguments: object, name: str = "sglang", dialect: str = "sglang", target: Any = None) -> Any:
        monkeypatch.setenv("ACT", acts)
        monkeypatch.setenv("PYTHONPATH", str(engine(tmp_path / f"engine-{name}", name)))
        model = pairs.target(tmp_path / "model", target)
        changes = {"norm_before_residual": False} if dialect == "vllm" else {}  # else SGLang cannot run it
        drafter = pairs.drafter(tmp_path / dialect, dialect, **changes)
        port = () if "--port" in arguments else ("--port", free_port())
        return eyas("launch", "--engine", name, model, "--drafter", drafter, *port, *arguments)

    yield run
    signal.signal(signal.SIGINT, before)
    recorded = json.loads((tmp_path / "pids").read_text()) if (tmp_path / "pids").exists() else []
    assert not [pid for pid in recorded if psutil.pid_exists(pid)]


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_started_followed_and_over(launch):
    ran = launch("plug proves environment listens ready answers briefly", "--page-size", "1")
    assert ran.code == 0
    assert re.fullmatch(r"ready after \d+\.\d s: http://127.0.0.1:\d+ \(sglang 0\.7\.1, process \d+\)\n", ran.out)
    assert actor.READY["sglang"] in ran.err and "starting sglang 0.7.1: PYTHONUNBUFFERED=1 EYAS_PLUGIN=Llama" in ran.err
    passed_on = "the plugin gave LlamaForCausalLM get_embed_and_head, passed on to language_model: LlamaForCausalLM"
    assert passed_on in ran.err and "sglang 0.7.1 stopped after" in ran.err
    arguments = json.loads(re.search("ARGUMENTS (.*)", ran.err)[1])
    assert arguments[-2:] == ["--page-size", "1"] and "--speculative-algorithm" in arguments
    environment = json.loads(re.search("ENVIRONMENT (.*)", ran.err)[1])
    assert environment["EYAS_PLUGIN"] == "LlamaForCausalLM"
    assert not Path(environment["EYAS_PLUGIN_MARKERS"]).exists()  # what it was for is over
    assert Path(environment["PYTHONPATH"].split(os.pathsep)[0], "eyas_plugin", "entry.py").is_file()


def test_another_dialect(launch, tmp_path):
    ran = launch("environment listens ready answers briefly", dialect="vllm")
    assert ran.code == 0 and "note: the drafter is converted from the dialect vllm to sglang, since" in ran.err
    arguments = json.loads(re.search("ARGUMENTS (.*)", ran.err)[1])
    drafter = Path(arguments[arguments.index("--speculative-draft-model-path") + 1])
    assert drafter.parent == tmp_path / "cache" / "drafters"
    assert json.loads((drafter / "config.json").read_text())["architectures"] == ["LlamaForCausalLMEagle3"]


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_the_engines_own_traceback_and_what_it_means(launch, name):
    ran = launch("dies", "--no-check", "--no-plugin", name=name)
    assert ran.code == 1 and ran.out == ""
    shown = ran.err[ran.err.rindex("Traceback (most", 0, ran.err.rindex("error: ")) :]
    if name == "sglang":
        assert "Exception: Capture cuda graph failed" in shown
        assert "KimiK25ForConditionalGeneration does not pass set_eagle3_layers_to_capture on" in shown
    else:
        assert "RuntimeError: Model does not support EAGLE3 interface" in shown and "APIServer" not in shown
        assert "does not have vLLM's SupportsEagle3" in shown
    assert "fix: let eyas launch's plugin add it (do not use --no-plugin)" in shown


def test_a_marker_that_is_missing(launch):
    ran = launch("listens ready answers briefly", target=WRAPPED)
    assert ran.code == 0 and "note: the plugin left no mark: it ran in no process of the engine" in ran.err
    assert "so this is not put right: WrapperForConditionalGeneration has no get_embed_and_head" in ran.err
    ran = launch("plug listens ready answers briefly", target=WRAPPED)
    assert "note: the plugin ran in 1 process, none of which looked up WrapperForConditionalGeneration" in ran.err
    assert "note: the plugin puts this right: WrapperForConditionalGeneration has no get_embed_and_head" in ran.err


def test_refused_before_it_starts(launch, tmp_path):
    ran = launch("listens", "--no-plugin", target=WRAPPED)
    assert ran.code == 1 and "fits  no" in ran.out and "has no get_embed_and_head" in squeezed(ran.out)
    assert "error: not started: 2 problems that eyas launch cannot put right; --no-check starts it all" in ran.err
    assert not (tmp_path / "pids").exists() and not (tmp_path / "cache").exists()


def test_a_port_that_is_held(launch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        launched = launch("listens", "--port", port)
    assert launched.code == 1 and f"error: port {port} is held by process {os.getpid()} (" in launched.err
    assert not (tmp_path / "pids").exists()


def test_dry_run(launch, tmp_path):
    ran = launch("listens", "--dry-run", "--chat-template", "it's.jinja", dialect="vllm")
    assert ran.code == 0 and "the drafter is converted" in ran.err
    words = shlex.split(ran.out)
    assert words[-1] == "it's.jinja" and words[words.index("-m") + 1] == "sglang.launch_server"
    assert not (tmp_path / "pids").exists() and not (tmp_path / "cache").exists()


def test_interrupted(launch):
    ran = launch("family interrupts")
    assert ran.code == 130 and ran.out == "" and "error" not in ran.err
    assert "SIGINT was passed on to the engine; a second one kills it" in ran.err
    assert "sglang 0.7.1 was stopped before it was ready" in ran.err and "left behind: " in ran.err
    ran = launch("listens ready answers interrupts")
    assert ran.code == 0 and ran.out.startswith("ready after")  # its own code


def test_dead_while_serving(launch):
    ran = launch("listens ready answers later")
    assert ran.code == 7 and ran.out.startswith("ready after") and "does not pass set_eagle3_layers" in ran.err
    ran = launch("killed")
    assert ran.code == 1 and "it was killed (SIGKILL): mostly the kernel does that" in ran.err


def test_a_log_file(launch, tmp_path):
    log = tmp_path / "server.log"
    log.write_text("of an earlier run\n")
    ran = launch("unknown", "--log", log)
    assert ran.code == 1 and "Load weight begin" not in ran.err and "loading weights ..." in ran.err
    assert "ZeroDivisionError: division by zero\n\nerror: " in ran.err  # its traceback is shown all the same
    assert "no failure that Eyas knows: ZeroDivisionError: division by zero" in ran.err
    assert log.read_text().startswith("of an earlier run\n[2026-03-02 10:00:00] server_args=")
    launch("ready", "--log", tmp_path / "none" / "x").failed(2, "--log", "cannot be written")


def test_json(launch):
    ran = launch("plug listens ready answers interrupts", "--json")
    events = [record["event"] for record in ran.records]
    assert events[0] == "plan" and events[-1] == "end" and ran.code == 0
    by_name = {record["event"]: record for record in ran.records}
    assert by_name["plan"]["check"]["fits"] and by_name["plan"]["variables"]["EYAS_PLUGIN"] == "LlamaForCausalLM"
    assert by_name["ready"]["url"] == by_name["plan"]["url"] and by_name["ready"]["seconds"] > 0
    assert by_name["ready"]["plugin"]["proved"] is False and by_name["stopping"]["signal"] == "SIGINT"
    assert by_name["end"]["failed"] is False and by_name["end"]["code"] == 0
    assert {"event": "stage", "what": "loading weights", "done": 0.5} in ran.records
    end = launch("dies", "--json").records[-1]
    assert end["failed"] and end["traceback"].startswith("Traceback") and "Kimi" in end["diagnosis"]["what"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--speculative-algorithm", "NGRAM"], "eyas launch is for --speculative-algorithm EAGLE3"),
        (["--engine-python", "/nowhere"], "--engine-python /nowhere: no Python there"),
        (["--config", "/nowhere"], "--config /nowhere cannot be read"),
        (["--port", "x"], "--port x: expected a number"),
    ],
)
def test_what_cannot_be(launch, arguments, said):
    launch("ready", *arguments).failed(2, said)


def test_flags_before_the_target(eyas, tmp_path):
    ran = eyas("launch", "--engine", "vllm", "--port", "1", "model", "--drafter", tmp_path)
    ran.failed(2, "--port: the target comes first, the engine's own flags behind it")


def test_short_flags_of_the_engine_are_not_ours(launch):
    ran = launch("environment listens ready answers briefly", "-dph", "-tp", "2", "--x", "-1", "--", "--json")
    assert json.loads(re.search("ARGUMENTS (.*)", ran.err)[1])[-6:] == ["-dph", "-tp", "2", "--x", "-1", "--json"]


def test_as_a_process_of_its_own(tmp_path, monkeypatch):
    """SIGTERM from outside, and kill -9 of the launcher: nothing of the engine stays."""
    source = engine(tmp_path / "engine", "vllm")
    environment = {**os.environ, "EYAS_CACHE": str(tmp_path), "PIDS": str(tmp_path), "PYTHONPATH": str(source)}
    model, drafter = pairs.target(tmp_path / "model"), pairs.drafter(tmp_path / "drafter", "vllm")
    for number, code in ((signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)):
        command = [sys.executable, "-m", "eyas", "launch", "--engine", "vllm", str(model), "--drafter", str(drafter)]
        command += ["--port", str(free_port()), "--no-check", "--share-gpus", "--host", "127.0.0.1"]
        with subprocess.Popen(
            command, env=environment | {"ACT": "listens ready"}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as launcher:
            assert launcher.stdout is not None and launcher.stdout.readline().startswith(b"ready after")
            launcher.send_signal(number)
            assert launcher.wait(60) == code
        (pid,) = json.loads((tmp_path / "pids").read_text())
        _, alive = psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=30)
        assert not alive
