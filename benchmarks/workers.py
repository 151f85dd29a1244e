"""Workers as processes of their own: told what to do a JSON line at a time, halted while it is not their turn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from servers import Group


class WorkerError(Exception):
    """A worker is gone, or cannot do what it was told; others can."""


class Worker(Group):
    """``command`` answers as ``listen`` in ``peers/protocol.py`` does; ``log`` has what else it says.

    ``about`` is what it tells of itself. Raises WorkerError where it does not get ready.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None):
        self.name = name
        with tempfile.NamedTemporaryFile("w", prefix="eyas-worker-", suffix=".log", delete=False) as log:
            self.log = Path(log.name)
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        try:
            self.about: dict[str, Any] = self._hear()["ready"]
        except BaseException:
            self.end()
            raise
        self.halt()

    def tell(self, order: Any) -> dict[str, Any]:
        """What it answers. Raises WorkerError."""
        self.go_on()
        try:
            print(json.dumps(order), file=self.process.stdin, flush=True)
            result = self._hear()
        except BrokenPipeError:
            raise WorkerError(self._ended()) from None
        finally:
            self.halt()
        if "error" in result:
            raise WorkerError(f"{self.name}: {result['error']} ({self.log})")
        return result

    def end(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise WorkerError(self._ended())
        return json.loads(line)

    def _ended(self) -> str:
        last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        return f"{self.name} ended: {''.join(last)} ({self.log})"
