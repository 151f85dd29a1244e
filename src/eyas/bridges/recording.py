"""A real engine, started for one answer, with the plugin writing down what its drafter is fed and answers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from eyas.bridges.following import Ended, Ready, Server, Stage
from eyas.bridges.holders import free_port
from eyas.bridges.launch import Asked, DoesNotFitError, Plan, check_free, explain, forget, plan, plugin_said, prepare
from eyas.bridges.sglang import trace as sglang
from eyas.bridges.trace import Trace, read
from eyas.bridges.vllm import trace as vllm
from eyas.core import CheckpointError, EyasError
from eyas.progress import Report

FOLDER = "EYAS_PLUGIN_TRACE"
PROMPT = 512  # tokens of it at most: the states of all layers are kept here, and a line is written for every slot
TOKENS = 24  # of the answer: several drafts, and what the target made of them
_PATIENCE = 600.0  # seconds for the answer: eager, and perhaps on a busy machine
_GRACE = 30.0  # seconds that the engine has to end once it was told to
_ENGINES: dict[str, Any] = {"sglang": sglang, "vllm": vllm}


def record(asked: Asked, prompt: Sequence[int], report: Report, note: Callable[[str], None]) -> Trace:
    """Starts the engine, asks for one greedy answer to the prompt's first PROMPT tokens, and ends it. ``note`` hears
    what the user should know of it.

    Raises EyasError where the engine does not start, does not answer or leaves no trace, with the diagnosis.
    """
    prompt = prompt[:PROMPT]
    found = _planned(asked, report, note)
    try:
        assert found.markers is not None, "the plugin is always asked for"
        folder = found.markers / "calls"  # removed with the marks: here, or after a kill by the next launch
        found = replace(found, variables={**found.variables, FOLDER: str(folder)})
        answer = _answer(found, prompt, folder, report)
        traces = [_lines(file) for file in sorted(folder.glob("*.jsonl"))]
        lines = next((lines for lines in traces if any(line["call"] == "logits" for line in lines)), [])
        said = plugin_said(found)
        if not lines and said is not None:
            raise EyasError(f"{found.source.label} drafted nothing that could be traced: {said.text}")
        return read(lines, prompt, answer)
    finally:
        forget(found)


def _lines(file: Path) -> list[dict[str, Any]]:
    """Without a last one that is not whole: the engine is ended while it drafts on."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]


def _planned(asked: Asked, report: Report, note: Callable[[str], None]) -> Plan:
    """As eyas launch does it; but what only misbehaves silently is started all the same: it is what is looked for."""
    flags = _ENGINES[asked.engine].FLAGS
    if not any(part.partition("=")[0] == "--port" for part in asked.arguments):
        flags = (*flags, "--port", str(free_port()))
    if not any(part.partition("=")[0] == "--host" for part in asked.arguments):
        flags = (*flags, "--host", "127.0.0.1")
    asked = replace(asked, arguments=(*asked.arguments, *flags))
    try:
        found = plan(asked)
        check_free(found)
        return prepare(found, report)
    except DoesNotFitError as error:
        if fatal := [problem for problem in error.report.problems if problem.severity == "fails"]:
            said = "\n".join(f"{p.evidence}: {p.consequence}\nfix: {p.fix}" for p in fatal)
            raise EyasError(f"{error.report.engine} cannot be traced with this pair: {said}") from error
        for problem in error.report.problems:
            if problem.severity == "silent":
                note(f"eyas check says: {problem.evidence}")
    except CheckpointError as error:
        note(f"the drafter cannot be converted for {asked.engine}, and is started as it is: {error}")
    found = plan(replace(asked, check=False))
    check_free(found)
    return prepare(found, report)


def _answer(found: Plan, prompt: Sequence[int], folder: Path, report: Report) -> list[int]:
    """The engine's lines go nowhere: on failure the diagnosis says what matters of them."""
    report(f"starting {found.source.label}", None)
    environment = {**found.environment, **found.variables}
    with Server(found.command, environment, found.signs, found.address) as server:
        question = _Question(found, prompt, server.pid)
        for event in server.events():
            if isinstance(event, Stage):
                report(f"{found.source.label}: {event.what}", event.done)
            elif isinstance(event, Ready):
                report(f"{found.source.label} answers, and its drafter is written down", None)
                folder.mkdir(mode=0o700)  # what the prompt says can be read off it
                question.start()
            elif isinstance(event, Ended):
                return question.answered(event)
    raise AssertionError("the last event of a server is its end")


class _Question(threading.Thread):
    """Asks while the log is being followed, and ends the engine once it has the answer."""

    def __init__(self, found: Plan, prompt: Sequence[int], pid: int):
        super().__init__(daemon=True)
        self._found, self._prompt, self._pid = found, prompt, pid
        self._over = threading.Event()
        self._answer: list[int] | None = None
        self._error: str = ""

    def run(self) -> None:
        try:
            self._answer = self._ask()
        except EyasError as error:
            self._error = str(error)
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            self._error = f"{type(error).__name__}: {error}"
        finally:
            self._end()

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not self._over.is_set():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._pid, number) if number == signal.SIGKILL else os.kill(self._pid, number)
            self._over.wait(_GRACE)

    def _ask(self) -> list[int]:
        engine, key = _ENGINES[self._found.asked.engine], self._found.flags.get("api_key")
        key = key[0] if isinstance(key, list) else key  # vLLM takes several
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = self._found.address.url + engine.PATH
        with httpx.Client(timeout=_PATIENCE, verify=False, trust_env=False) as client:
            reply = client.post(url, json=engine.body(self._prompt, TOKENS), headers=headers)
        if reply.status_code != 200:
            raise EyasError(f"{url} says {reply.status_code}: {reply.text[:300]}")
        return [int(token) for token in engine.answer(reply.json())]

    def answered(self, ended: Ended) -> list[int]:
        """Raises EyasError where there is no answer, and KeyboardInterrupt where somebody ended the engine."""
        self._over.set()
        if self.is_alive():
            self.join(_GRACE)
        if self._answer is not None:
            return self._answer
        if ended.asked is not None:
            raise KeyboardInterrupt
        label = self._found.source.label
        if self._error and not ended.failing:
            raise EyasError(f"{label} did not answer: {self._error}")
        why = explain(self._found, ended)
        shown = f"\n{ended.traceback}" if ended.traceback else ""
        raise EyasError(f"{label} failed after {ended.seconds:.1f} s: {why.what}\nfix: {why.fix}{shown}")
