from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli import tiny
from zoo import VOCAB

from eyas.cli.main import main
from eyas.drafter import storage
from eyas.drafter.model import untrained


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    def failed(self, code: int, *words: str) -> None:
        """One error on one screen: its exit code, what it says, no traceback, and nothing on stdout."""
        assert self.code == code, self.err
        assert self.out == ""
        assert re.findall(r"^error: ", self.err, re.MULTILINE) == ["error: "] and "Traceback" not in self.err
        assert len(self.err.splitlines()) <= 24
        for word in words:
            assert word in self.err


@pytest.fixture
def eyas(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs the command line in this process; stdin is a pipe."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)

    def run(*args: object, stdin: str | bytes = b"") -> Ran:
        content = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        with pytest.raises(SystemExit) as left:
            main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return Ran(left.value.code or 0, out, err)

    return run


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that fits ``target``."""
    folder = tmp_path_factory.mktemp("drafter")
    storage.save(untrained(32, 4, VOCAB, seed=3), folder)
    return folder
