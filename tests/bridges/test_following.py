"""A child that behaves like an engine: ready, dead, stopped and stuck told apart, and never an orphan."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from bridges import actor

from eyas.bridges import following
from eyas.bridges.following import Address, Ended, Event, Line, Ready, Server, Stage, Stopping
from eyas.bridges.holders import free_port
from eyas.bridges.sglang import launch as sglang
from eyas.bridges.vllm import launch as vllm
from eyas.core import EyasError

ENGINES = {"sglang": sglang, "vllm": vllm}
SCRIPTS = {"sglang": "launch_server.py", "vllm": "main.py"}


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, seconds in (("_TICK", 0.05), ("_GRACE", 0.5)):
        monkeypatch.setattr(following, name, seconds)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def server(tmp_path: Path) -> Callable[..., Server]:
    def make(acts: str, engine: str = "vllm", log: Any = None, flags: dict[str, Any] | None = None) -> Server:
        script = tmp_path / SCRIPTS[engine]
        script.write_text(Path(actor.__file__).read_text())
        port = free_port()
        environment = {**os.environ, "ACT": acts, "PIDS": str(tmp_path)}
        signs = ENGINES[engine].signs(flags or {}, {})
        command = [sys.executable, str(script), "--port", str(port)]
        return Server(command, environment, signs, Address("127.0.0.1", port), log)

    return make


@pytest.fixture(autouse=True)
def no_orphans(tmp_path: Path) -> Iterator[None]:
    """Whatever a test does: nothing of what the actor started is left, and no child of ours."""
    yield
    recorded = json.loads((tmp_path / "pids").read_text()) if (tmp_path / "pids").exists() else []
    assert not [pid for pid in recorded if alive(pid)]
    assert not [
        child
        for child in psutil.Process().children(recursive=True)
        if any(name in " ".join(child.cmdline()) for name in SCRIPTS.values())
    ]


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def run(server: Server, on_ready: Callable[[Server], None] = lambda server: None) -> tuple[list[Event], Ended]:
    events = []
    with server:
        for event in server.events():
            events.append(event)
            if isinstance(event, Ready):
                on_ready(server)
    assert isinstance(events[-1], Ended) and sum(isinstance(e, Ended) for e in events) == 1
    return events, events[-1]


def seconds_of(events: list[Event]) -> list[float]:
    return [event.seconds for event in events if isinstance(event, Ready)]


def itself(number: int) -> Callable[[Server], None]:
    return lambda server: os.kill(os.getpid(), number)


@pytest.mark.parametrize("engine", ENGINES)
def test_ready_followed_and_stopped(server, engine):
    log = io.BytesIO()
    events, ended = run(server("listens ready", engine, log), itself(signal.SIGTERM))
    lines = [event.text for event in events if isinstance(event, Line)]
    assert actor.READY[engine] in lines and "[shutdown] as asked" in lines
    assert log.getvalue().decode() == "".join(t if t.startswith("\r") else t + "\n" for t in actor.SAYS[engine]) + (
        f"{actor.READY[engine]}\n[shutdown] as asked\n"
    )
    assert not [line for line in lines if "  0% Completed" in line]  # what a bar was before is no line
    stages = [(event.what, event.done) for event in events if isinstance(event, Stage)]
    assert ("loading weights", 0.0) in stages and ("loading weights", 1.0) in stages
    assert stages[-1][0] == {"sglang": "capturing graphs", "vllm": "starting the API server"}[engine]
    assert [event for event in events if isinstance(event, Stopping)] == [Stopping(signal.SIGTERM)]
    assert len(seconds_of(events)) == 1 and 0 < seconds_of(events)[0] < ended.seconds
    assert (ended.code, ended.asked, ended.was_ready, ended.failed) == (0, signal.SIGTERM, True, False)


def test_a_line_is_not_enough(server):
    events, _ = run(server("slowly ready"), itself(signal.SIGINT))
    assert seconds_of(events)[0] > 0.7  # until then its health endpoint answered 503
    events, ended = run(server("ready briefly"))
    assert not seconds_of(events) and not ended.was_ready and ended.failed  # it never listened


def test_an_answer_is_not_enough(server):
    events, ended = run(server("listens briefly"))
    assert not seconds_of(events) and ended.failed
    events, ended = run(server("listens answers briefly", flags={"uvicorn_log_level": "warning"}))
    assert seconds_of(events) and not ended.failed  # unless it was told not to say it


@pytest.mark.parametrize("engine", ENGINES)
def test_dead_at_once_with_the_root_cause(server, engine):
    began = time.monotonic()
    _, ended = run(server("dies", engine))
    assert time.monotonic() - began < 60
    assert (ended.code, ended.failed, ended.hung, ended.was_ready) == (1, True, False, False)
    lines = ended.traceback.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and "APIServer" not in ended.traceback
    if engine == "vllm":
        assert lines[-1].startswith("RuntimeError: Model does not support EAGLE3 interface but")
        assert lines[1].startswith('  File "/vllm/v1/engine/core.py"')
    else:
        assert lines.count("Traceback (most recent call last):") == 2  # the exception and what came of it
        assert lines[-1].startswith("Exception: Capture cuda graph failed")


@pytest.mark.parametrize("engine", ENGINES)
def test_failing_without_an_end_is_ended(server, engine, monkeypatch):
    monkeypatch.setattr(following, "_PATIENCE", 0.5)
    _, ended = run(server("family hangs", engine))
    assert ended.hung and ended.failed and ended.seconds < 60
    assert {"sglang": "Capture cuda graph failed", "vllm": "EAGLE3 interface"}[engine] in ended.traceback


def test_dead_while_serving(server):
    events, ended = run(server("listens ready answers later"))
    assert seconds_of(events) and ended.was_ready and ended.failed and ended.code == 7


def test_what_it_showed_before_it_served_is_not_why_it_ends(server):
    _, ended = run(server("warns listens ready answers badly"))
    assert ended.was_ready and ended.failed and ended.traceback == ""
    _, ended = run(server("warns badly"))
    assert ended.traceback.endswith("ModuleNotFoundError: No module named 'y'")


def test_a_log_on_a_full_disk(server):
    said = "the log cannot be written to /dev/full: No space left"
    with Path("/dev/full").open("wb", buffering=0) as full, pytest.raises(EyasError, match=said):
        run(server("listens ready", log=full))


def test_a_prompt_in_the_log_kills_nothing(server):
    made = server("ready")
    text = "(APIServer pid=1) INFO 11-30 08:13:05 [logger.py:1] Received request: 'EngineCore failed to start.'"
    assert not made.signs.fatal.match(text[made.signs.header.match(text).end() :])


def test_a_server_that_answers_is_left_alone(server, monkeypatch):
    monkeypatch.setattr(following, "_PATIENCE", 0.2)
    _, ended = run(server("listens ready answers mutters briefly"))
    assert not ended.hung and ended.code == 0 and not ended.failed


def test_ends_by_itself(server):
    _, ended = run(server("listens ready answers briefly"))
    assert (ended.code, ended.failed, ended.asked) == (0, False, None)
    _, ended = run(server("listens ready answers badly"))
    assert (ended.code, ended.failed) == (3, True)
    _, ended = run(server("killed"))
    assert (ended.code, ended.failed) == (-signal.SIGKILL, True)


def test_a_family_is_ended(server, tmp_path):
    _, ended = run(server("family listens ready"), itself(signal.SIGTERM))
    pids = json.loads((tmp_path / "pids").read_text())
    assert len(pids) == 4 and len(ended.left) == 3  # those that ignored the signal, wherever they had gone
    assert all(any(left.startswith(f"{pid} (") for left in ended.left) for pid in pids[1:])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_who_is_told_to_end_finishes_with_its_workers(server, number):
    _, ended = run(server("workers listens ready"), itself(number))
    assert (ended.code, ended.failed, ended.left) == (0, False, ())


def test_a_family_that_lost_its_head(server):
    _, ended = run(server("family killed"))
    assert ended.code == -signal.SIGKILL and len(ended.left) == 3


def test_a_second_signal_kills(server):
    def twice(server: Server) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)).start()

    _, ended = run(server("family stubborn listens ready"), twice)
    assert (ended.code, ended.asked, ended.failed) == (-signal.SIGKILL, signal.SIGINT, False)


def test_who_is_told_to_end_while_it_loads(server, monkeypatch):
    """vLLM takes a signal once it has loaded: it is neither waited for nor called ready."""
    monkeypatch.setattr(following, "_PATIENCE", 0.5)
    made = server("family stubborn interrupts slowly ready")
    events, ended = run(made)
    assert (ended.asked, ended.failed, ended.was_ready) == (signal.SIGINT, False, False)
    assert not seconds_of(events) and len(ended.left) == 4 and ended.seconds < 60


def test_handlers_and_reaping_are_as_before(server):
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does it
    before = [signal.getsignal(number) for number in following._SIGNALS]
    try:
        with server("ready") as running:
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) == running._pass_on
        assert [signal.getsignal(number) for number in following._SIGNALS] == before
    finally:
        signal.signal(signal.SIGHUP, hangup)


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt()])
def test_an_exception_of_ours(server, error):
    with pytest.raises(type(error)), server("family listens ready") as running:
        for event in running.events():
            if isinstance(event, Ready):
                raise error


def test_what_cannot_be_started(server):
    made = server("ready")
    made.command = ["/nowhere/python"]
    with pytest.raises(EyasError, match=r"/nowhere/python cannot be started: .*No such file"):
        made.__enter__()


@pytest.mark.parametrize("acts", ["listens ready", "family stubborn listens ready"])
def test_killed_ourselves(server, tmp_path, acts):
    """kill -9 of the launcher: its guard ends the engine, also what ignores SIGTERM."""
    made = server(acts)
    code = f"""
        import os, signal
        from eyas.bridges import following
        from eyas.bridges.vllm.launch import signs
        following._GRACE = 0.5
        address = following.Address("127.0.0.1", {made.address.port})
        with following.Server({list(made.command)}, dict(os.environ), signs({{}}, {{}}), address) as server:
            for event in server.events():
                if isinstance(event, following.Ready):
                    os.kill(os.getpid(), signal.SIGKILL)
        """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=dict(made.environment), timeout=60)
    assert ran.returncode == -signal.SIGKILL
    pids = json.loads((tmp_path / "pids").read_text())
    apart = pids[2:3]  # a session of its own: what no guard but a supervisor finds
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in pids if pid not in apart) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if pid not in apart and alive(pid)]
    for pid in apart:
        os.kill(pid, signal.SIGKILL)


def test_an_address():
    assert Address("127.0.0.1", 8000).url == "http://127.0.0.1:8000"
    assert Address("::1", 8000, tls=True).url == "https://[::1]:8000"
    assert not following.healthy(Address("127.0.0.1", free_port()))
