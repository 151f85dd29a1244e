"""What a person can get wrong: one clear sentence and 2 or 1, never a traceback, nothing written."""

from __future__ import annotations

import io
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from bridges import pairs
from bridges.engines import SGLANG, VLLM, WRAPPER, write

from eyas.bridges.flags import read_flags
from eyas.cli.main import main
from eyas.core import UsageError


class Ran:
    def __init__(self, code: int, out: str, err: str):
        self.code, self.out, self.err = code, out, err
        self.said = " ".join(out.split())


@pytest.fixture
def eyas(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def run(*args: object) -> Ran:
        with pytest.raises(SystemExit) as left:
            main(["check", *map(str, args)])
        return Ran(left.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture
def here(tmp_path: Path) -> dict[str, Path]:
    return {
        "target": pairs.target(tmp_path / "target"),
        "drafter": pairs.drafter(tmp_path / "drafter", "sglang"),
        "engine": write(tmp_path / "engine", SGLANG, sglang__srt__models__wrapper=WRAPPER),
    }


def arguments(here: dict[str, Path], **changes: Any) -> list[object]:
    given = {
        "target": here["target"],
        "drafter": here["drafter"],
        "engine": "sglang",
        "path": here["engine"],
        **changes,
    }
    flags = {"--drafter": given["drafter"], "--engine": given["engine"], "--engine-path": given["path"]}
    return [given["target"], *(x for flag, value in flags.items() if value is not None for x in (flag, value))]


def test_a_pair_that_fits(eyas, here):
    ran = eyas(*arguments(here))
    assert ran.code == 0 and ran.err == "" and ran.said.endswith("fits yes")
    record = json.loads(eyas(*arguments(here), "--json").out)
    assert record["fits"] is True and record["engine"] == "sglang 0.7.1"
    assert [p["severity"] for p in record["problems"]] == ["note"]


def test_a_pair_that_does_not(eyas, here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    pairs.target(here["target"], architectures=["WrapperForConditionalGeneration"], text_config=pairs.TARGET)
    ran = eyas(*arguments(here))
    assert ran.code == 1 and max(map(len, ran.out.splitlines())) <= 100
    assert "has no get_embed_and_head" in ran.said and "=> dies" in ran.said and "fix: " in ran.said


@pytest.mark.parametrize("width", [60, 100])
def test_the_matrix_fits_the_screen(eyas, here, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    ran = eyas("--matrix", "--engine-path", here["engine"])
    assert ran.code == 0 and max(map(len, ran.out.splitlines())) <= width
    assert "2 ready, 1 delegation suffices, 0 decided at run time, 0 cannot" in ran.said
    record = json.loads(eyas("--matrix", "--engine-path", here["engine"], "--json").out)
    assert record["version"] == "0.7.1" and len(record["architectures"]) == 3


def test_eyas_itself_as_the_engine(eyas, here):
    assert eyas(*arguments(here, engine="local", path=None)).code == 0
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 5, pairs.LAYERS]}  # the last one can only be an entry id
    pairs.drafter(here["drafter"], "sglang", eagle_config=ids)
    ran = eyas(*arguments(here, engine="local", path=None))
    assert ran.code == 0 and "entry ids [2, 5, 10]" in ran.said
    pairs.target(here["target"], hidden_size=64)
    ran = eyas(*arguments(here, engine="local", path=None))
    assert ran.code == 1 and "made for a target of hidden_size 32, this target's is 64" in ran.said
    pairs.drafter(here["drafter"], "sglang", without=("norm.weight",))
    assert "Eyas refuses to load it" in eyas(*arguments(here, engine="local", path=None)).said


def test_flags_of_the_engine(eyas, here):
    tree = ["--speculative-num-steps", "3", "--speculative-eagle-topk=4", "--page-size", "64"]
    ran = eyas(*arguments(here), "--", *tree, "--attention-backend", "triton", "--enable-metrics")
    assert ran.code == 1 and "wants pages of 1" in ran.said
    assert eyas(*arguments(here), "--", *tree, "--attention-backend", "fa3").code == 0
    assert eyas(*arguments(here), "--", "--cuda-graph-bs", "1", "2", "4", *tree, "--attention-backend", "fa3").code == 0


def test_reading_flags():
    given = ["--a-b", "3", "--c=x", "-d", "--e", "-1.5", "--f", '{"k": [1]}', "--g", "--h", "1", "2", "x", "--i"]
    said = {"a_b": 3, "c": "x", "d": True, "e": -1.5, "f": {"k": [1]}, "g": True, "h": [1, 2, "x"], "i": True}
    assert read_flags(given) == said
    for broken in (["x"], ["--a=1", "2"], ["--f", "{"]):
        with pytest.raises(UsageError):
            read_flags(broken)


def wheel(path: Path, name: str, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\nVersion: 1.0\n")
    return path


MADE = {
    "target that is nowhere": (2, {"target": "nowhere"}, "nowhere does not exist"),
    "target without a config": (2, {"target": lambda h: h["engine"]}, "is not a model folder: it has no config.json"),
    "target that is a file": (2, {"target": lambda h: h["target"] / "config.json"}, "is a file"),
    "drafter that is nowhere": (1, {"drafter": "nowhere"}, "no such file"),
    "drafter without weights": (1, {"drafter": lambda h: h["target"]}, "expected model.safetensors"),
    "engine that is nowhere": (2, {"path": "nowhere"}, "no such file or folder"),
    "engine that is another": (2, {"engine": "vllm"}, "expected vllm in it, found sglang"),
    "engine that is a model": (2, {"path": lambda h: h["target"]}, "expected sglang in it"),
    "engine of no name": (2, {"engine": "llama.cpp"}, "llama.cpp"),
    "engine that is not installed": (2, {"engine": "vllm", "path": None}, "vllm is not installed here"),
    "no engine": (2, {"engine": None, "path": None}, "name the engine"),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_not_there(eyas, here, name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, changes, words = MADE[name]
    ran = eyas(*arguments(here, **{k: v(here) if callable(v) else v for k, v in changes.items()}))
    refused(ran, code, words)


def refused(ran: Ran, code: int, *words: str) -> None:
    err = " ".join(re.sub("[│╭╮╰╯─]", " ", ran.err).split())
    assert ran.code == code and ran.out == "" and "Traceback" not in ran.err, ran.err
    assert all(word in err for word in words), err


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("target/config.json", "{", "config.json: not valid JSON"),
        ("target/config.json", "[1]", "expected a JSON object"),
        ("target/config.json", "[" * 100_000, "not valid JSON"),
        ("target/config.json", "\udcff", "not valid JSON"),
        ("drafter/config.json", "{", "config.json: not valid JSON"),
        ("drafter/config.json", '{"hidden_size": "x"}', "expected a positive integer"),
        ("drafter/model.safetensors", "x", "not a whole safetensors file"),
    ],
)
def test_malformed_files(eyas, here, file, content, words):
    (here["target"].parent / file).write_text(content, errors="surrogateescape")
    refused(eyas(*arguments(here)), 1, words)


def test_wheels_of_something_else(eyas, here, tmp_path):
    numpy = wheel(tmp_path / "numpy-1.0-py3-none-any.whl", "numpy", {"numpy/__init__.py": ""})
    refused(eyas(*arguments(here, path=numpy)), 2, "a wheel of numpy, not of sglang")
    refused(eyas("--matrix", "--engine-path", numpy), 2, "holds none of sglang, vllm")
    vllm = wheel(tmp_path / "vllm-1.0-py3-none-any.whl", "vllm", VLLM)
    refused(eyas(*arguments(here, path=vllm)), 2, "a wheel of vllm, not of sglang")


def test_an_engine_from_before_eagle_3(eyas, here):
    for file in here["engine"].rglob("*.py"):
        file.write_text(re.sub("eagle", "bird", file.read_text(), flags=re.IGNORECASE))
    refused(eyas(*arguments(here)), 1, "sglang 0.7.1", "knows no EAGLE-3", "take a newer version")


def test_an_engine_that_was_taken_apart(eyas, here):
    """Files that are empty or broken leave questions open, or are named in one sentence."""
    for name in ("spec_info", "model_runner", "model_config", "server_args", "llama_eagle3", "llama"):
        for file in here["engine"].rglob(f"{name}.py"):
            for broken in ("def (:\n", ""):
                content = file.read_text()
                file.write_text(broken + "# eagle3\n")
                ran = eyas(*arguments(here))
                assert ran.code in (0, 1) and "Traceback" not in ran.err + ran.out
                assert ran.out or f"{name}.py cannot be parsed: invalid syntax, line 1" in ran.err
                file.write_text(content)


def test_an_unreadable_file(eyas, here, monkeypatch):
    read = Path.read_bytes

    def refuse(self: Path) -> bytes:
        if self.name == "eagle_worker.py":
            raise PermissionError(13, "Permission denied", str(self))
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    refused(eyas(*arguments(here)), 1, "eagle_worker.py cannot be read", "Permission denied")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "nothing to check"),
        (["--matrix"], "--matrix is about an engine alone"),
        (["x", "--engine", "sglang"], "an engine needs both"),
        (["--matrix", "--engine", "local"], "--matrix is about an engine alone"),
    ],
)
def test_words_in_the_wrong_order(eyas, given, words):
    refused(eyas(*given), 2, words)


def test_an_argument_too_many(eyas, here):
    refused(eyas(*arguments(here), "and", "more"), 2, "unexpected argument 'and'")


def test_a_config_cannot_write_on_the_terminal(eyas, here):
    pairs.target(here["target"], architectures=["\x1b]0;hacked\x07Evil"])
    ran = eyas(*arguments(here))
    assert ran.code == 1 and "\x1b" not in ran.out and "\x07" not in ran.out


def test_nothing_is_written(eyas, here, tmp_path):
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    eyas(*arguments(here))
    eyas("--matrix", "--engine-path", here["engine"])
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
