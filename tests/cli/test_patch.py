"""``eyas patch``: shown, agreed to, done, checked, and taken back."""

from __future__ import annotations

import pytest
from bridges import pairs
from bridges.engines import SGLANG, WRAPPER, write

from eyas.bridges import patch
from eyas.bridges.code.source import open_engine

pytest.importorskip("libcst")

WRAPPED = {"architectures": ["WrapperForConditionalGeneration"], "text_config": pairs.TARGET}


@pytest.fixture
def engine(tmp_path):
    return write(tmp_path / "engine", SGLANG, sglang__srt__models__wrapper=WRAPPER)


@pytest.fixture
def model(tmp_path):
    return pairs.target(tmp_path / "model", WRAPPED)


def test_nothing_without_agreement(eyas, engine, model):
    before = (engine / "sglang/srt/models/wrapper.py").read_bytes()
    ran = eyas("patch", model, "--engine-path", engine)
    assert ran.code == 2 and "nothing was changed; --yes changes it" in ran.err
    assert "+    def get_embed_and_head(self):" in ran.out
    assert (engine / "sglang/srt/models/wrapper.py").read_bytes() == before


def test_patched_checked_and_restored(eyas, engine, model, tmp_path):
    file = engine / "sglang/srt/models/wrapper.py"
    before, drafter = file.read_bytes(), pairs.drafter(tmp_path / "drafter", "sglang")
    assert eyas("check", model, "--drafter", drafter, "--engine-path", engine).code == 1
    ran = eyas("patch", model, "--engine", "sglang", "--engine-path", engine, "--drafter", drafter, "--yes")
    assert ran.code == 0 and "patched and checked" in ran.out and "fits  yes" in ran.out
    assert eyas("check", model, "--drafter", drafter, "--engine-path", engine).code == 0
    eyas("patch", model, "--engine-path", engine, "--yes").failed(2, "there is nothing to patch; patched by eyas")
    ran = eyas("patch", "--revert", "--engine-path", engine)
    assert ran.code == 0 and f"restored {file}" in " ".join(ran.out.split()) and file.read_bytes() == before
    eyas("patch", "--revert", "--engine-path", engine).failed(2, "is not patched: there is nothing to revert")


def test_two_at_once(eyas, engine, model):
    with patch.alone(open_engine("sglang", engine)):
        for how in ((model, "--yes"), ("--revert",)):
            eyas("patch", *how, "--engine-path", engine).failed(1, "another eyas patch is at work in")
    before = (engine / "sglang/srt/models/wrapper.py").read_bytes()
    assert eyas("patch", model, "--engine-path", engine, "--yes").code == 0
    assert eyas("patch", "--revert", "--engine-path", engine).code == 0
    assert (engine / "sglang/srt/models/wrapper.py").read_bytes() == before


def test_behind_an_upgrade(eyas, engine, model):
    file = engine / "sglang/srt/models/wrapper.py"
    before = file.read_bytes()
    for arguments in ([model, "--engine-path", engine, "--yes"], ["--revert", "--engine-path", engine]):
        assert eyas("patch", model, "--engine-path", engine, "--yes").code == 0
        file.write_bytes(before + b"\n# of the next version\n")
        ran = eyas("patch", *arguments)
        assert ran.code == 0 and f"{file} holds nothing of its patch" in " ".join(ran.err.split())
        if "--revert" in arguments:
            assert file.read_bytes() == before + b"\n# of the next version\n" and not ran.out
        else:
            assert (
                b"get_embed_and_head" in file.read_bytes()
                and eyas("patch", "--revert", "--engine-path", engine).code == 0
            )
        file.write_bytes(before)
    assert [p.name for p in file.parent.glob("wrapper*")] == ["wrapper.py"]


def test_a_drafter_that_does_not_fit_behind_the_patch(eyas, engine, model, tmp_path):
    drafter = pairs.drafter(tmp_path / "drafter", "sglang", draft_vocab_size=...)
    ran = eyas("patch", model, "--engine-path", engine, "--drafter", drafter, "--yes")
    assert ran.code == 1 and "patched and checked" in ran.out and "fits  no" in ran.out
    assert b"get_embed_and_head" in (engine / "sglang/srt/models/wrapper.py").read_bytes()  # the engine is as asked for


def test_as_json(eyas, engine, model):
    (found,) = eyas("patch", model, "--engine-path", engine, "--yes", "--json").records
    (changed,) = found["patched"]
    assert found["engine"] == "sglang" and found["check"] is None
    assert changed["file"].endswith("wrapper.py") and "+    def get_embed_and_head(self):" in changed["diff"]
    assert eyas("patch", "--revert", "--engine-path", engine, "--json").records == [{"restored": [changed["file"]]}]


def test_a_patch_that_does_not_help_is_taken_back(eyas, engine, model, monkeypatch):
    file = engine / "sglang/srt/models/wrapper.py"
    before, found = file.read_bytes(), patch.missing
    monkeypatch.setattr(patch, "apply", lambda edits, apply=patch.apply: (apply(edits), file.write_bytes(before)))
    ran = eyas("patch", model, "--engine-path", engine, "--yes")
    assert ran.code == 1 and "still missing behind the patch: WrapperForConditionalGeneration" in ran.err
    assert file.read_bytes() == before and found is patch.missing
    assert [p.name for p in file.parent.glob("wrapper*")] == ["wrapper.py"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name the engine to patch"),
        (["--engine", "sglang"], "takes a target's folder, or --revert and no target"),
        (["model", "--engine", "sglang", "--revert"], "takes a target's folder, or --revert and no target"),
        (["--engine", "sglang", "--revert", "--yes"], "--drafter and --yes say nothing about it"),
        (["model", "--engine", "sglang", "--json"], "--json cannot ask; add --yes"),
        (["model", "--engine-path", "/nowhere"], "no such file or folder"),
    ],
)
def test_what_cannot_be_asked(eyas, arguments, said):
    eyas("patch", *arguments).failed(2, said)
