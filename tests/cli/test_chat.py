"""A conversation: turns, commands, what is remembered, and how it ends."""

from __future__ import annotations

import builtins
import io
import signal
import sys

import pytest
from cli import tiny

from eyas.cli import chat as chat_module
from eyas.engine.llm import LLM

TALK = ("--chat", "--drafter", "untrained", "--max-tokens", "6")


def answers(ran):
    assert ran.code == 0, ran.err
    return ran.out.splitlines()


def test_turns_are_remembered_until_reset(eyas, target):
    ran = eyas("run", target, *TALK, "--json", stdin="w5 w6\nw7\n\n/reset\n/help\nw5 w6\n/exit\nw8\n")
    turns = ran.records
    assert [turn["prompt"] for turn in turns] == ["w5 w6", "w7", "w5 w6"]
    assert [turn["prompt_tokens"] for turn in turns] == [4, 4 + 6 + 3, 4]
    assert turns[0]["token_ids"] == turns[2]["token_ids"]
    assert "/reset starts over" in ran.err


def test_statistics_after_every_turn(eyas, target):
    ran = eyas("run", target, *TALK, "--speculation", "fixed", stdin="w5 w6\nw7\n")
    assert len(answers(ran)) == 2
    assert ran.err.count("6 tokens, ") == ran.err.count("acceptance length") == 2
    assert answers(eyas("run", target, *TALK, stdin="w5 w6\nw7\n")) == answers(ran)


def test_a_prompt_opens_the_conversation(eyas, target):
    ran = eyas("run", target, "w5 w6", *TALK, "--json", stdin="w7")
    assert [turn["prompt"] for turn in ran.records] == ["w5 w6", "w7"]


def test_the_system_message_survives_a_reset(eyas, target):
    ran = eyas("run", target, *TALK, "--json", "--system", "w3 w4", stdin="w5\n/reset\nw5\n")
    assert [turn["prompt_tokens"] for turn in ran.records] == [6, 6]


def test_a_failure_ends_a_piped_conversation(eyas, target, tmp_path):
    ran = eyas("run", target, *TALK, "--context-length", 16, stdin="w5 w6\nw7 w8\nw9\n")
    assert ran.code == 2
    assert len(ran.out.splitlines()) == 2 and ran.err.count("error: ") == 1 and "the context holds 16" in ran.err
    without = tiny.save(tmp_path, template=None)
    eyas("run", without, *TALK, stdin="w5\n").failed(2, "no chat template")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def typed(eyas, monkeypatch, capsys):
    """Talks with ``lines`` typed at a terminal; an exception among them is raised in their place."""

    def talk(*args, lines):
        waiting = iter(lines)

        def one_line(prompt=""):
            line = next(waiting, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", one_line)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setattr(io, "TextIOWrapper", lambda *_: Terminal())
        return eyas(*args)

    return talk


def test_a_terminal_without_prompt_is_a_conversation(typed, target):
    ran = typed("run", target, "--drafter", "untrained", "--max-tokens", 6, lines=["w5", "/exit"])
    assert "/reset starts over" in ran.err
    assert len(answers(ran)) == 1


def test_an_error_does_not_end_a_typed_conversation(typed, target):
    ran = typed("run", target, *TALK, "--context-length", 16, "--json", lines=["w5 " * 30, "w5"])
    assert ran.code == 0
    assert "error: The prompt has 32 tokens" in ran.err
    assert [turn["prompt_tokens"] for turn in ran.records] == [3]  # what failed is forgotten


def test_ctrl_c_at_the_prompt_goes_on(typed, target):
    ran = typed("run", target, *TALK, lines=[KeyboardInterrupt(), "w5"])
    assert len(answers(ran)) == 1


def interrupting(monkeypatch, at, times=1):
    """Ctrl-C when so many outputs have come."""
    complete = LLM.complete

    def slow(self, request, listen):
        heard = 0

        def hear(output):
            nonlocal heard
            heard += 1
            if heard == at:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            listen(output)

        return complete(self, request, hear)

    monkeypatch.setattr(LLM, "complete", slow)


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(typed, target, monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupting(patch, at=3)
        ran = typed("run", target, "--chat", "--max-tokens", 50, lines=["w5 w6", "w7"])
    assert ran.code == 0 and ran.err.count("(stopped)") == 2
    first, second = ran.out.splitlines()
    assert len(first.split()) == len(second.split()) == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_not_wait(typed, target, monkeypatch):
    interrupting(monkeypatch, at=3, times=2)
    ran = typed("run", target, "--chat", "--max-tokens", 50, lines=["w5 w6"])
    assert ran.code == 0 and "(stopped)" in ran.err and len(ran.out.split()) == 2


def test_a_stopped_answer_as_json(typed, target, monkeypatch):
    interrupting(monkeypatch, at=3)
    (found,) = typed("run", target, "--chat", "--max-tokens", 50, "--json", lines=["w5 w6"]).records
    assert found["finish_reason"] == "abort" and len(found["text"].split()) == 3


def test_the_line_from_a_terminal_while_stdout_is_a_file(monkeypatch, capsys):
    terminal = Terminal("w5\r\n")
    monkeypatch.setattr(sys, "stdin", terminal)
    assert chat_module.ask() == "w5"
    assert chat_module.ask() is None
    out, err = capsys.readouterr()
    assert out == "" and err == "> > "


def test_an_image_goes_with_the_first_message(eyas, tmp_path):
    from PIL import Image

    seeing = tiny.save_seeing(tmp_path / "seeing")
    Image.new("RGB", (20, 20), "red").save(tmp_path / "red.png")
    talk = ("run", seeing, "--chat", "--max-tokens", 4, "--json", "--image", tmp_path / "red.png")
    ran = eyas(*talk, stdin="w5\n/reset\nw5\n")
    assert [turn["prompt_tokens"] for turn in ran.records] == [9, 9]
