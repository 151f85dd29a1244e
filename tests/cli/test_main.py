"""Ways out: help, versions, and every kind of failure."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

import eyas as package
from eyas.cli import check as check_module
from eyas.cli import run as run_module


def test_version_and_help(eyas):
    assert eyas("--version").out == f"eyas {package.__version__}\n"
    assert eyas().code == 2
    for verb in ([], ["run"], ["check"]):
        shown = eyas(*verb, "--help")
        assert shown.code == 0
        assert "eyas run smollm2" in shown.out if verb != ["check"] else "eyas check ./my-drafter" in shown.out


@pytest.mark.parametrize(
    "args",
    [
        ["fly"],
        ["run"],
        ["run", "x", "hello", "--no-such-flag"],
        ["run", "x", "hello", "--max-tokens", "many"],
    ],
)
def test_a_command_line_that_cannot_be_parsed_is_a_usage_error(eyas, args):
    ran = eyas(*args)
    assert ran.code == 2
    assert ran.out == "" and "Usage: eyas" in ran.err and "Traceback" not in ran.err


@pytest.mark.parametrize("args", [["check"], ["check", "x", "y"]])
def test_a_check_of_nothing_in_particular_is_a_usage_error(eyas, args):
    ran = eyas(*args)
    assert (ran.code, ran.out) == (2, "") and ran.err.startswith("error: ") and "--drafter" in ran.err


def raising(error):
    def load(*_, **__):
        raise error

    return load


@pytest.fixture
def broken(monkeypatch):
    """Loading a target raises what the test says."""
    return lambda error: monkeypatch.setattr("eyas.cli.options.LoadingFlags.load", raising(error))


def test_an_unforeseen_error_is_one_line(eyas, broken):
    broken(ZeroDivisionError("[bold]first[/bold]\nsecond"))
    eyas("run", "x", "hello").failed(1, "internal error: ZeroDivisionError: [bold]first[/bold] (run again with --debug")


@pytest.mark.parametrize("args", [["--debug", "run", "x", "hello"], ["run", "x", "hello", "--debug"]])
def test_debug_shows_the_traceback(eyas, broken, args):
    broken(ZeroDivisionError("oh"))
    ran = eyas(*args)
    assert ran.code == 1
    assert "Traceback" in ran.err and "in raising" not in ran.err and "error: internal error" in ran.err


@pytest.mark.parametrize("args", [["check", "~nosuchuser/x"], ["run", "~nosuchuser/x", "hello"]])
def test_a_home_that_there_is_not(eyas, args):
    eyas(*args).failed(2, "~nosuchuser/x: no home folder is known for it; write the path out, or set HOME")


def test_nobody_s_home(eyas, monkeypatch):
    """A container under a user that no one has entered."""
    for name in ("HOME", "EYAS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    eyas("run", "smollm2", "hello").failed(2, "~: no home folder is known for it")


def test_errors_of_the_system_are_no_internal_errors(eyas, broken):
    broken(PermissionError(13, "Permission denied", "/secret"))
    eyas("run", "x", "hello").failed(1, "error: [Errno 13] Permission denied: '/secret'")


def test_an_error_cannot_take_over_the_terminal(eyas):
    eyas("check", "\x1b]0;owned\x07[red]x").failed(1, "\ufffd]0;owned\ufffd[red]x")


def test_interrupted(eyas, broken):
    broken(KeyboardInterrupt())
    ran = eyas("run", "x", "hello")
    assert ran.code == 130
    assert ran.out == "" and "Traceback" not in ran.err and "error" not in ran.err


PROBE = """
import sys
from eyas.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as left:
    assert not left.code, left.code
heavy = {"torch", "transformers", "numpy", "huggingface_hub", "accelerate", "pyarrow", "httpx"}
heavy |= {"asyncio", "fastapi", "uvicorn", "pydantic", "scipy", "libcst"}
heavy &= set(sys.modules)
print(*sorted(heavy), file=sys.stderr)
"""


def heavy_modules(*args: object) -> set[str]:
    done = subprocess.run([sys.executable, "-c", PROBE, *map(str, args)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_help_imports_nothing_heavy(target):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert heavy_modules("--help") == set()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 0.6  # about 0.2 s; with torch it would be 3


def test_check_never_imports_torch(drafter):
    light = {"numpy", "pydantic"}  # the latter by typer, where it is installed
    assert heavy_modules("check", drafter) <= light
    assert heavy_modules("check", drafter, "--json") <= light


def test_it_is_a_module_too():
    done = subprocess.run([sys.executable, "-m", "eyas", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"eyas {package.__version__}\n"


def test_a_reader_that_has_gone_is_no_error(drafter):
    command = f"{sys.executable} -m eyas check {drafter} --json | head -c 1 > /dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "1")  # it may have been quick enough


def test_verbs_have_their_own_modules():
    assert check_module.check.__module__ == "eyas.cli.check"
    assert run_module.run.__name__ == "run"
