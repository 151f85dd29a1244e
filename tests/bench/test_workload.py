from __future__ import annotations

import json
import os
import threading

import pytest

from eyas.bench.prompts import BUILTIN
from eyas.bench.workload import builtin, chosen, from_file
from eyas.core import UsageError
from eyas.training.dataset import DataError
from eyas.training.heldout import HELDOUT


def test_built_in_prompts():
    workload = builtin()
    assert set(workload.prompts) == {"chat", "code", "maths", "summarising", "translation", "long"}
    assert all(len(prompts) >= 20 for prompts in workload.prompts.values())
    texts = [prompt.text for prompts in workload.prompts.values() for prompt in prompts]
    assert len(set(texts)) == len(texts) and all(BUILTIN[task] == HELDOUT[task] for task in HELDOUT)
    assert all(1200 < len(prompt.text.split()) < 1500 for prompt in workload.prompts["long"])
    assert [prompt.key for prompt in builtin(["code"]).prompts["code"][:2]] == ["code/1", "code/2"]


def test_a_long_question_is_about_a_passage_that_is_there():
    """By a name of its own that question and passage share."""
    for prompt in builtin(["long"]).prompts["long"]:
        notes, question = prompt.text.rsplit("Question: ", 1)
        words = {word.strip("?,.'") for word in question.split() if len(word) > 5}
        assert any(word in notes for word in words)


def test_lines_that_are_no_prompts_are_counted_and_named(tmp_path):
    lines = [
        '{"prompt": "one"}',
        "",
        "{broken",
        '{"conversations": [{"from": "human", "value": "two"}, {"from": "gpt", "value": "never asked"}]}',
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, '
        '{"role": "user", "content": "three"}]}',
        '{"messages": [{"role": "tool", "content": "x"}]}',
        '["a list"]',
        "",
        '{"prompt": "  "}',
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(lines))
    workload = from_file(file)
    assert [(p.key, p.messages[-1]["content"]) for p in workload.prompts["mine"]] == [
        ("mine/1", "one"),
        ("mine/2", "two"),
        ("mine/3", "three"),
    ]
    assert len(workload.prompts["mine"][2].messages) == 3
    assert workload.left_out == (
        "2 empty (lines 2, 8)",
        "1 not JSON (line 3)",
        "1 roles or contents that are not known (line 6)",
        "1 of no known shape (line 7)",
        "1 conversations with an empty question (line 9)",
    )
    assert "mine.jsonl (SHA-256 " in workload.source


def test_half_a_character_is_left_out(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "fine \\ud83e\\udd89"}\n{"prompt": "half \\ud83e"}\n')
    workload = from_file(file)
    assert [prompt.text for prompt in workload.prompts["mine"]] == ["fine \N{OWL}"]
    assert workload.left_out == ("1 with half a character (a lone surrogate) (line 2)",)


def test_the_digest_of_prompts():
    one, other = builtin(["code"]), builtin(["code", "chat"])
    assert one.digest == builtin(["code"]).digest != other.digest and len(one.digest) == 64


def test_files_without_a_prompt(tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text("nonsense\n" * 9)
    with pytest.raises(UsageError, match=r"leaves no prompt to ask: 9 not JSON \(lines 1, 2, 3, 4, 5, \.\.\.\)"):
        from_file(file)
    file.write_text("")
    with pytest.raises(
        UsageError, match=r"bad.jsonl \(SHA-256 e3b0c44298fc\) leaves no prompt to ask: nothing is in it\."
    ):
        from_file(file)
    os.mkfifo(pipe := tmp_path / "pipe")
    writer = threading.Thread(target=pipe.write_text, args=('{"prompt": "Hi."}\n',))
    writer.start()
    assert len(from_file(pipe).prompts["pipe"]) == 1
    writer.join()
    with pytest.raises(DataError, match="cannot be read"):
        from_file(tmp_path / "missing.jsonl")
    with pytest.raises(UsageError, match="no built-in prompts for 'poems'"):
        builtin(["poems"])


def test_rounds_go_on_where_the_last_one_ended():
    prompts = builtin(["chat"]).prompts["chat"][:5]
    keys = [[prompt.key[5:] for prompt in chosen(prompts, 3, turn)] for turn in range(3)]
    assert keys == [["1", "2", "3"], ["4", "5", "1"], ["2", "3", "4"]]
    assert json.dumps([p.key for p in chosen(prompts, 7, 0)][5:]) == '["chat/1", "chat/2"]'
