"""benchmarks/soak.py, for seconds: good and bad callers at a live ``eyas serve``; and that it finds what is wrong."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import ModuleType

import httpx
import pytest


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import soak

    return soak


@pytest.mark.timeout(240)
def test_a_hundred_and_fifty_callers(soak, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    report = soak.soak("tiny", "untrained", 150, 48, tokens=12, cases=16, limit=200)
    assert not report.problems
    assert sum(report.callers.values()) == 150 and set(report.callers) == set(soak.KINDS)
    assert report.compared >= report.callers["whole"] + report.callers["stream"] > 50
    assert {"200", "400", "401"} <= set(report.statuses)
    assert len(report.memory) >= 4 and report.files[1] <= report.files[0]


def case(soak, **more):
    told = {"texts": ("w5 w9", "w7"), "finishes": ("length", "stop"), "tokens": 3}
    return soak.Case(**{"path": soak.CHAT, "body": {"n": 2}, **told, **more})


def test_it_finds_what_is_mixed_up_lost_or_miscounted(soak):
    def answer(**more):
        given = {"texts": {0: "w5 w9", 1: "w7"}, "finishes": {0: "length", 1: "stop"}, "tokens": 3, "ended": True}
        return soak.Answer(**{**given, **more})

    asked = case(soak)
    assert soak.complaint(asked, answer()) is None
    assert "another text at 0" in soak.complaint(asked, answer(texts={0: "w7", 1: "w5 w9"}))
    assert "another text at 1" in soak.complaint(asked, answer(texts={0: "w5 w9"}))
    assert "ended by None" in soak.complaint(asked, answer(finishes={0: "length"}))
    assert "2 tokens" in soak.complaint(asked, answer(tokens=2))
    assert "broke off" in soak.complaint(asked, answer(ended=False))


def test_streams_are_put_together_by_choice(soak):
    answer = soak.Answer()
    for event in (
        '{"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": null}]}',
        '{"choices": [{"index": 1, "delta": {"content": "w7"}, "finish_reason": "stop"}]}',
        '{"choices": [{"index": 0, "delta": {"content": "w5"}, "finish_reason": null}]}',
        '{"choices": [{"index": 0, "delta": {"content": " w9"}, "finish_reason": "length"}]}',
        '{"choices": [], "usage": {"completion_tokens": 3}}',
        "[DONE]",
    ):
        soak.take(answer, event)
    assert soak.complaint(case(soak), answer) is None
    with pytest.raises(ValueError, match="roof"):
        soak.take(answer, '{"error": {"message": "roof"}}')


def test_a_server_is_ended_once(soak, monkeypatch):
    import servers

    server = servers.ServerProcess("sleeps", [sys.executable, "-c", "import time; time.sleep(60)"])
    assert server.end() == -signal.SIGTERM
    monkeypatch.setattr(servers.os, "killpg", lambda *_: pytest.fail("that group may be somebody else's by now"))
    assert server.end() == -signal.SIGTERM
    server.log.unlink()


def test_growth_is_that_of_a_line_through_the_second_half(soak):
    assert soak.growth([(t, 100.0 + 20 * (t < 50)) for t in range(100)]) == pytest.approx(0)
    assert soak.growth([(t, 100.0 + t / 10) for t in range(100)]) == pytest.approx(4.9)
    assert soak.growth([]) == 0


def test_it_reads_the_servers_log(soak):
    good = "10:00 INFO draining open_requests=0\n10:00 INFO request id=x error=Error\n"
    assert soak.log_problems(good, 0) == []
    for log, status, words in (
        (good + "10:00 ERROR fault id=x\n", 0, "fault"),
        (good + "Traceback (most recent call last):\n", 0, "Traceback"),
        (good, 1, "status 1"),
        (good.replace("=0", "=2"), 0, "were open"),
        ("", 0, "never said"),
    ):
        (problem,) = soak.log_problems(log, status)
        assert words in problem


def test_a_caller_who_gets_another_answer_is_a_problem(soak, live):
    """The same code as above, with a truth that is none."""
    import asyncio
    import os

    body = {"prompt": "w5 w9", "max_tokens": 4, "temperature": 0}
    wrong = soak.Case(soak.COMPLETIONS, body, ("no such text",), ("length",), 4)
    run = soak.Soak(live.url, os.getpid(), [wrong], 12, 2, 0)
    report = asyncio.run(run.run(60))
    assert [p for p in report.problems if "another text" in p] and "afterwards" in " ".join(report.problems)
    with httpx.Client(base_url=live.url, trust_env=False) as client:
        assert client.get("/health").status_code == 200
