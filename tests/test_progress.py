"""What is shown of long work: on stderr only, one display at a time, and nothing of what is quick."""

from __future__ import annotations

import threading
import time

import pytest

from eyas import progress
from eyas.progress import if_slow, note, on_stderr

HIDDEN_CURSOR = "\x1b[?25l"  # how a live display begins


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")


def waiting() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "eyas-progress"]


def until_shown(capsys: pytest.CaptureFixture[str]) -> str:
    """What is on stderr by and by."""
    seen, end = "", time.monotonic() + 10
    while not seen and time.monotonic() < end:
        time.sleep(0.01)
        seen = capsys.readouterr().err
    return seen


def test_a_line_per_step_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with on_stderr() as report:
        for what, done in (("fetching", 0.1), ("fetching", 0.9), ("unpacking", None), ("fetching", None)):
            report(what, done)
    assert capsys.readouterr() == ("", "fetching ...\nunpacking ...\nfetching ...\n")


@pytest.mark.usefixtures("terminal")
def test_a_live_bar_on_a_terminal_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with on_stderr() as report:
        report("loading [bold]x :bird:", None)
        time.sleep(0.3)
    out, err = capsys.readouterr()
    assert out == "" and err.count(HIDDEN_CURSOR) == 1
    assert "loading [bold]x :bird:" in err, "names are no markup"
    assert err.rstrip().endswith("\x1b[2K"), "the line is erased in the end"


@pytest.mark.usefixtures("terminal")
def test_one_display_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    with on_stderr() as outer, on_stderr() as inner:
        assert inner is outer
    with on_stderr() as again:
        assert again is not outer
    assert capsys.readouterr().err.count(HIDDEN_CURSOR) == 2


def test_within_a_display_slow_work_is_shown_there(capsys: pytest.CaptureFixture[str]) -> None:
    with on_stderr() as report:
        report("loading x", None)
        with if_slow("loading x"), if_slow("reading y"):
            assert not waiting()
    assert capsys.readouterr().err == "loading x ...\nreading y ...\n"


def test_what_is_quick_is_not_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    with if_slow("loading x"):
        assert waiting()
    assert not waiting() and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("on_terminal", [True, False])
def test_what_is_slow(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, request, live: bool, on_terminal: bool
) -> None:
    if on_terminal:
        request.getfixturevalue("terminal")
    monkeypatch.setattr(progress, "PATIENCE", 0.02)
    with pytest.raises(ZeroDivisionError), if_slow("loading x", live=live):
        seen = until_shown(capsys)
        raise ZeroDivisionError
    seen += capsys.readouterr().err
    assert not waiting()
    if on_terminal and live:
        assert HIDDEN_CURSOR in seen and "loading x" in seen and "\x1b[?25h" in seen
    else:
        assert seen == "loading x ...\n"


def test_patience_is_two_seconds() -> None:
    assert progress.PATIENCE == 2


def test_a_note_stays(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> None:
    note("as it is [x]")
    assert capsys.readouterr() == ("", "note: as it is [x]\n")
    request.getfixturevalue("terminal")
    with on_stderr() as report:
        report("loading", None)
        time.sleep(0.2)
        note("as it is")
    line = next(line for line in capsys.readouterr().err.splitlines() if "as it is" in line)
    assert "note: " in line and "loading" not in line.rpartition("\x1b[2K")[2], "above the bar, on a line of its own"
