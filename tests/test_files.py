"""Whole or not at all, whatever happens on the way."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from eyas.core import CheckpointError, TargetError
from eyas.files import read_json, whole, whole_folder, write_json, write_whole


def test_a_file_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "it.txt"
    write_whole(path, "grün\n")
    assert path.read_bytes() == "grün\n".encode()
    with whole(path) as draft:
        draft.write_bytes(b"next")
        assert path.read_text(encoding="utf-8") == "grün\n"
    assert path.read_bytes() == b"next"
    write_json(path, {"a": [1]})
    assert path.read_text() == '{\n  "a": [\n    1\n  ]\n}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["it.txt"]


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_a_file_keeps_what_it_held_where_writing_fails(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "it.txt"
    path.write_text("before")
    with pytest.raises(type(error)), whole(path) as draft:
        draft.write_text("half")
        raise error
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("it.txt", "before")]


def test_what_was_never_written_takes_no_place(tmp_path: Path) -> None:
    path = tmp_path / "it.txt"
    path.write_text("before")
    with pytest.raises(FileNotFoundError), whole(path):
        pass
    assert path.read_text() == "before"


def test_content_is_on_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened, sync, move = [], os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        happened.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    def moved(self: Path, target: Path) -> Path:
        happened.append(f"{self.name} -> {target.name}")
        return move(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", moved)
    write_whole(tmp_path / "it.txt", "x")
    assert happened == [".it.txt.part", ".it.txt.part -> it.txt", tmp_path.name]


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    for name in ("one", "two"):
        with whole_folder(out) as new:
            (new / "in").mkdir()
            (new / "in" / name).write_text(name)
    assert [p.relative_to(tmp_path).as_posix() for p in sorted(tmp_path.rglob("*"))] == [
        "deep", "deep/out", "deep/out/in", "deep/out/in/two",
    ]  # fmt: skip


def test_a_folder_keeps_what_it_held_where_writing_fails(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "before").touch()
    with pytest.raises(RuntimeError), whole_folder(out) as new:
        (new / "half").touch()
        raise RuntimeError
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "before"]


def test_folders_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    (tmp_path / ".out.part-dead").mkdir()
    with whole_folder(tmp_path / "out") as new, whole_folder(tmp_path / "out") as other:
        assert new.is_dir()
        assert other.is_dir()
        assert not (tmp_path / ".out.part-dead").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "expected a JSON object, found list"),
        (b'{"a": "' + b"x" * 100 + b'"}', "109 bytes is too much"),
    ],
)
def test_what_is_no_object_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "it.json"
    file.write_bytes(content)
    with pytest.raises(TargetError, match=f"it.json: .*{said}"):
        read_json(file, TargetError, limit=100 if b"x" in content else 200_000)


def test_an_object_and_none(tmp_path: Path) -> None:
    file = tmp_path / "it.json"
    with pytest.raises(CheckpointError, match=r"it\.json: missing; it is wanted$"):
        read_json(file, CheckpointError, "it is wanted")
    with pytest.raises(CheckpointError, match=r"missing$"):
        read_json(tmp_path, CheckpointError)
    file.write_text(json.dumps({"ä": None}), encoding="utf-8")
    assert read_json(file, CheckpointError) == {"ä": None}


def test_what_a_dead_process_left_goes_whatever_the_name(tmp_path: Path) -> None:
    stale, gone = tmp_path / ".m[1].part-dead", tmp_path / ".m[1].part-gone"
    stale.mkdir()
    gone.symlink_to(tmp_path / "nowhere")  # as one that vanishes while it is looked at
    with whole_folder(tmp_path / "m[1]") as folder:
        (folder / "a").write_text("x")
    assert not stale.exists() and (tmp_path / "m[1]" / "a").read_text() == "x"
