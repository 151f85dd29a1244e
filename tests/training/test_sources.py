from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.training.dataset import DataError
from eyas.training.sources import file_hash, read_conversations


def lines(folder: Path, *entries: Any) -> Path:
    file = folder / "p.jsonl"
    file.write_text("\n".join(e if isinstance(e, str) else json.dumps(e) for e in entries), encoding="utf-8")
    return file


def test_the_three_shapes(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    shared = [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}]
    file = lines(
        tmp_path, {"messages": turns, "id": 1}, "", {"conversations": shared}, {"prompt": "p"}, {"prompt": parts}
    )
    found = list(read_conversations(file))
    assert [c.line for c in found] == [1, 3, 4, 5]
    assert [c.messages for c in found] == [
        turns,
        [{"role": "system", "content": "s"}, *turns],
        [{"role": "user", "content": "p"}],
        [{"role": "user", "content": "xy"}],
    ]
    assert not any(c.problem for c in found)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{not json", "line 2 is not JSON"),
        ([1], "line 2: found 'list'"),
        ({"text": "x"}, "line 2: found 'text', expected"),
        ({"prompt": 5}, "line 2: found 'prompt'"),
    ],
)
def test_a_file_of_something_else(tmp_path: Path, entry: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        list(read_conversations(lines(tmp_path, {"prompt": "p"}, entry)))


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "without a question"),
        ([{"role": "system", "content": "s"}], "without a question"),
        ([{"role": "assistant", "content": "b"}], "out of order"),
        ([{"role": "user", "content": "a"}] * 2, "out of order"),
        ([{"role": "user", "content": " \n"}], "empty question"),
        ([{"role": "tool", "content": "x"}], "not known"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "not known"),
        ([{"role": "user", "content": None}], "not known"),
        (["hello"], "not known"),
    ],
)
def test_conversations_that_cannot_be_answered_are_marked(tmp_path: Path, messages: Any, problem: str) -> None:
    (found,) = read_conversations(lines(tmp_path, {"messages": messages}))
    assert problem in found.problem


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for read in (lambda path: list(read_conversations(path)), file_hash):
        with pytest.raises(DataError, match="cannot be read"):
            read(tmp_path / "none")
