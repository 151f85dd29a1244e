"""What people see: tints, statistics, and nothing that could take over the terminal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from cli.tiny import tokenizer

from eyas.cli.console import clean
from eyas.cli.render import Terminal, brief_statistics, statistics
from eyas.core import Request, SamplingParams
from eyas.engine.llm import Completion
from eyas.engine.lossless import Comparison
from eyas.engine.sequence import Emitted, Output
from eyas.engine.stats import AcceptanceStats

REQUEST = Request("0", [1, 2, 3], SamplingParams(max_tokens=4))
TOKENS = (Emitted(5, "one", False), Emitted(6, " two", True), Emitted(7, " three", False))
LLM = SimpleNamespace(tokenizer=tokenizer(), target=SimpleNamespace(dtype="torch.bfloat16"))


def completion(tokens=TOKENS, reason="stop", **more):
    stats = AcceptanceStats(steps=2, drafted=10, emitted=3, reached=[2, 1, 0], accepted=[1, 0, 0])
    text = "".join(token.text for token in tokens)
    return Completion(
        **{
            "text": text, "tokens": tokens, "finish_reason": reason, "prompt_tokens": 3, "stats": stats,
            "prefill_seconds": 0.25, "decode_seconds": 0.5, **more,
        }
    )  # fmt: skip


def shown(capsys, monkeypatch, *, show_drafts, **env):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal(LLM, show_drafts)
    terminal.write(Output("0", TOKENS))
    terminal.answer("hello", REQUEST, completion())
    out, err = capsys.readouterr()
    return out, err


def test_accepted_draft_tokens_are_tinted(capsys, monkeypatch):
    out, err = shown(capsys, monkeypatch, show_drafts=True, FORCE_COLOR="1", TERM="xterm-256color")
    assert out == "one\x1b[32m two\x1b[0m three\n"
    assert "accepted draft tokens look like this" in err


def test_without_colour_they_are_underlined(capsys, monkeypatch):
    out, _ = shown(capsys, monkeypatch, show_drafts=True, FORCE_COLOR="1", NO_COLOR="1", TERM="xterm-256color")
    assert out == "one\x1b[4m two\x1b[0m three\n"


@pytest.mark.parametrize("env", [{}, {"FORCE_COLOR": "1", "TERM": "dumb"}])
def test_where_nothing_can_be_tinted_it_is_said(capsys, monkeypatch, env):
    out, err = shown(capsys, monkeypatch, show_drafts=True, **env)
    assert out == "one two three\n"
    assert "nothing is tinted" in " ".join(err.split()) and "look like this" not in err


def test_no_tint_unless_asked_for(capsys, monkeypatch):
    out, err = shown(capsys, monkeypatch, show_drafts=False, FORCE_COLOR="1", TERM="xterm-256color")
    assert out == "one two three\n"
    assert "look like this" not in err


def test_a_terminal_is_not_given_control_characters(capsys, monkeypatch):
    evil = "a\x1b[2J\x07b\tc\r\nd\u009b1m"
    assert clean(evil) == "a\ufffd[2J\ufffdb\tc\nd\ufffd1m"
    monkeypatch.setenv("FORCE_COLOR", "1")
    Terminal(LLM).write(Output("0", (Emitted(1, evil, False),)))
    assert capsys.readouterr().out == clean(evil)


def test_a_comparison_shows_what_was_accepted(capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = Terminal(LLM, show_drafts=True)
    terminal.comparison((1, 1), "hello", Comparison(completion(), completion(), ()))
    out = capsys.readouterr().out
    assert out.count("\x1b[32m two\x1b[0m") == 2 and "(accepted drafts)" in out


@pytest.mark.parametrize("seconds, believed", [(0.35, True), (0.2, False)])
def test_a_speedup_that_cannot_be_is_said_to_be_none(seconds, believed, capsys):
    """1.5 tokens a step on average can make it 1.5 times as fast, hardly more."""
    fast = completion(decode_seconds=seconds)
    Terminal(LLM).comparison((1, 1), "hello", Comparison(completion(), fast, ()))
    out = " ".join(capsys.readouterr().out.split())
    assert f"speedup {0.5 / seconds:.2f}x" in out and ("more than its drafts can bring" in out) != believed


def test_a_pipe_is_given_every_byte(capsys):
    evil = "a\x1b[2J :smile: [red]x\tc\r\n"
    Terminal(LLM).write(Output("0", (Emitted(1, evil, False),), "stop", tail="\ufffd"))
    assert capsys.readouterr().out == evil + "\ufffd"


def test_statistics():
    rows = dict(statistics(REQUEST, completion()))
    assert rows["tokens"] == "3 (complete)"
    assert rows["speed"] == "4.0 tokens/s"
    assert rows["first token"] == "after 0.25 s (prompt of 3 tokens)"
    assert rows["acceptance length"] == "1.50 tokens per verify step (2 steps)"
    assert rows["acceptance rate"] == "50% 0% at draft positions 1, 2, ... (10 draft tokens)"
    assert brief_statistics(completion()) == "3 tokens, 4.0 tokens/s, acceptance length 1.50, rates 50% 0%"


def test_why_an_answer_ended():
    four = (*TOKENS, TOKENS[0])
    assert dict(statistics(REQUEST, completion(four, "length")))["tokens"] == "4 (cut off: --max-tokens)"
    assert dict(statistics(REQUEST, completion(reason="length")))["tokens"] == "3 (cut off: the context is full)"


def test_a_single_token_has_no_speed():
    rows = dict(statistics(REQUEST, completion(TOKENS[:1], decode_seconds=1e-6, stats=AcceptanceStats())))
    assert rows["speed"] == "- tokens/s" and "acceptance length" not in rows
