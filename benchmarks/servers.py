"""Servers under test as processes of their own: started, waited for, halted while it is not their turn, ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

PATIENCE = 1800.0  # seconds for a target to be loaded and compiled


class ServerError(Exception):
    """A server did not start, or is gone."""


class Group:
    """A process that leads a group of its own: a signal reaches whatever it starts."""

    process: subprocess.Popen[Any]

    def halt(self) -> None:
        """It uses no CPU until ``go_on``."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class ServerProcess(Group):
    """``command`` with ``--port`` of our choice behind it, in a group of its own; ``log`` has all that it says."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None):
        self.name, self.port = name, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.status: int | None = None  # with which it ended
        with tempfile.NamedTemporaryFile("w", prefix="eyas-server-", suffix=".log", delete=False) as log:
            self.log = Path(log.name)
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    def wait(self, seconds: float = PATIENCE) -> None:
        """Until requests are answered. Raises ServerError where that never comes."""
        end = time.monotonic() + seconds
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while time.monotonic() < end:
                if self.process.poll() is not None:
                    raise ServerError(f"{self.name} ended: {self.last_line} ({self.log})")
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{self.url}/health").status_code == 200:
                        return
                time.sleep(0.1)
        raise ServerError(f"{self.name} was not ready within {seconds:.0f} s ({self.log})")

    @property
    def last_line(self) -> str:
        return "".join(self.log.read_text(errors="replace").strip().splitlines()[-1:])

    def end(self, seconds: float = 40.0) -> int:
        """Tells it to end, as an operator would, and returns its exit status; who does not is killed."""
        if self.status is not None:  # its group may be another's by now
            return self.status
        self.go_on()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        finally:
            self._signal(signal.SIGKILL)  # and with it what it has started
        self.process.wait()
        self.status = status
        return status


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]
