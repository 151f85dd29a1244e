"""Patching an engine's source: in the published wheels, and in engines in miniature for whatever may go wrong."""

from __future__ import annotations

import ast
import builtins
import os
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from bridges import pairs
from bridges.engines import SGLANG, VLLM, WRAPPER, edited, write
from bridges.wheels import wheel

from eyas.bridges import patch
from eyas.bridges.changes import CannotPatchError
from eyas.bridges.check import check
from eyas.bridges.code.source import open_engine
from eyas.bridges.target import open_target
from eyas.core import EyasError, UsageError

pytest.importorskip("libcst")

IDS = "eagle_aux_hidden_state_layer_ids"
GRAPHS = "sglang/srt/model_executor/cuda_graph_runner.py"
RUNNER = "sglang/srt/model_executor/model_runner.py"


def installed(name: str, place: Path, *folders: str) -> Path:
    """The Python files of a wheel, where pip would put them."""
    site = place / "lib" / "python3.11" / "site-packages"
    with ZipFile(wheel(name)) as archive:
        names = [n for n in archive.namelist() if n.endswith((".py", "METADATA", "RECORD"))]
        archive.extractall(site, [n for n in names if n.startswith(folders) or ".dist-info/" in n])
    return site


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


# The founding case


def test_the_founding_case(tmp_path):
    """SGLang 0.5.9 as published: what was missing is there, the check sees it, and it can all be taken back."""
    site = installed("sglang-0.5.9", tmp_path / "venv", "sglang/srt/", "sglang/version.py", "sglang/__init__.py")
    target = pairs.target(tmp_path / "target", pairs.KIMI)
    drafter = pairs.drafter(tmp_path / "drafter", "sglang", eagle_config={IDS: [1, 3, 6]})
    wrapper = site / "sglang/srt/models/kimi_k25.py"
    stale = wrapper.parent / "__pycache__" / "kimi_k25.cpython-311.pyc"
    other = wrapper.parent / "__pycache__" / "kimi_vl.cpython-311.pyc"
    other.parent.mkdir()
    other.write_bytes(b"of another module")
    before = contents(site)
    stale.write_bytes(b"compiled long ago")

    def asked() -> list[str]:
        report = check(target, drafter, open_engine("sglang", tmp_path / "venv"), {}, {})
        return [p.evidence for p in report.problems if p.severity != "note"]

    first = asked()
    assert len(first) == 3  # both methods, and the layers at graph capture behind them
    edits = patch.plan(open_engine("sglang", tmp_path / "venv"), open_target(target))
    assert contents(site) == before | {"sglang/srt/models/__pycache__/kimi_k25.cpython-311.pyc": b"compiled long ago"}
    assert [edit.name for edit in edits] == ["sglang/srt/models/kimi_k25.py", GRAPHS]
    assert edits[0].what == (
        "KimiK25ForConditionalGeneration: set_eagle3_layers_to_capture, get_embed_and_head, set_embed_and_head, "
        "passed on to DeepseekV3ForCausalLM in self.language_model",
    )
    added = [line for edit in edits for line in edit.diff().splitlines() if line.startswith("+") and line[:3] != "+++"]
    assert [line[1:].strip() for line in added if line.strip() != "+"] == [
        "# Added by eyas patch; eyas patch --revert takes it out again.",
        "def set_eagle3_layers_to_capture(self, layer_ids=None):",
        "return self.language_model.set_eagle3_layers_to_capture(layer_ids)",
        "def get_embed_and_head(self):",
        "return self.language_model.get_embed_and_head()",
        "def set_embed_and_head(self, embed, head):",
        "return self.language_model.set_embed_and_head(embed, head)",
        "self.model_runner.model.set_eagle3_layers_to_capture(self.model_runner.eagle_aux_hidden_state_layer_ids)",
    ]
    removed = [line for e in edits for line in e.diff().splitlines() if line.startswith("-") and line[:3] != "---"]
    assert [line[1:].strip() for line in removed] == ["self.model_runner.model.set_eagle3_layers_to_capture()"]

    patch.apply(edits)
    assert asked() == []
    assert not stale.exists() and other.exists()
    _is_the_same_but_for_three_methods(before["sglang/srt/models/kimi_k25.py"], wrapper.read_bytes())
    with pytest.raises(UsageError, match=r"lacks nothing for KimiK25ForConditionalGeneration.*patched by eyas"):
        patch.plan(open_engine("sglang", tmp_path / "venv"), open_target(target))

    files = patch.patched_files(open_engine("sglang", tmp_path / "venv"))
    assert files == sorted(edit.file for edit in edits)
    patch.revert(files)
    assert contents(site) == before
    assert asked() == first


def _is_the_same_but_for_three_methods(before: bytes, after: bytes) -> None:
    trees = [ast.parse(before), ast.parse(after)]
    (cls,) = [n for n in trees[1].body if isinstance(n, ast.ClassDef) and n.name == "KimiK25ForConditionalGeneration"]
    names = [n.name for n in cls.body[-3:] if isinstance(n, ast.FunctionDef)]
    assert names == ["set_eagle3_layers_to_capture", "get_embed_and_head", "set_embed_and_head"]
    del cls.body[-3:]
    assert ast.dump(trees[0]) == ast.dump(trees[1])


def test_a_wrapper_of_vllm(tmp_path):
    """vLLM 0.32 as published: KimiVL holds a DeepSeek that is a target, and does not say so."""
    folders = [f"vllm/{f}" for f in ("model_executor/", "v1/", "config/", "transformers_utils/configs/", "models/")]
    site = installed("vllm-0.32.0", tmp_path / "venv", *folders, "vllm/__init__.py", "vllm/_version.py")
    inner = {**pairs.TARGET, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    config = {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "image_token_index": 7,
        "text_config": inner,
        "vision_config": {"model_type": "moonvit"},
    }
    target = pairs.target(tmp_path / "target", config)
    drafter = pairs.drafter(tmp_path / "drafter", "vllm")
    before = contents(site)

    def lacking() -> list[str]:
        report = check(target, drafter, open_engine("vllm", site), {}, {"VLLM_USE_V2_MODEL_RUNNER": "0"})
        return [p.evidence for p in report.problems if "SupportsEagle3" in p.evidence]

    assert len(lacking()) == 1
    edits = patch.plan(open_engine("vllm", site), open_target(target))
    patch.apply(edits)
    assert lacking() == []
    written = (site / "vllm/model_executor/models/kimi_vl.py").read_text()
    for line in (
        "    supports_eagle3 = True",
        "    has_own_lm_head = False",
        "    has_own_embed_tokens = False",
        "        return self.language_model.set_aux_hidden_state_layers(layers)",
        "        return self.language_model.get_eagle3_default_aux_hidden_state_layers()",
    ):
        assert f"\n{line}\n" in written
    patch.revert(patch.patched_files(open_engine("vllm", site)))
    assert contents(site) == before


# In miniature


WRAPPED = {"architectures": ["WrapperForConditionalGeneration"], "text_config": pairs.TARGET}
MODULE = "sglang/srt/models/wrapper.py"
LATE = edited(
    SGLANG,
    GRAPHS,
    "class CudaGraphRunner: ...\n",
    """
    class CudaGraphRunner:
        def __init__(self, model_runner):
            self.model_runner = model_runner
            if model_runner.eagle_use_aux_hidden_state:
                self.model_runner.model.set_eagle3_layers_to_capture()
    """,
)


@pytest.fixture
def small(tmp_path):
    """An engine with a wrapper that forwards nothing, and the way to plan a patch of it."""

    class Small:
        root = tmp_path / "engine"
        file = root / MODULE

        def write(self, files=SGLANG, wrapper: str = WRAPPER) -> Small:
            write(self.root, files, sglang__srt__models__wrapper=wrapper)
            return self

        def source(self, name: str = "sglang"):
            return open_engine(name, self.root)

        def plan(self, target=WRAPPED, name: str = "sglang") -> list[patch.Edit]:
            return patch.plan(self.source(name), open_target(pairs.target(tmp_path / "target", target)))

        def patch(self) -> list[patch.Edit]:
            edits = self.plan()
            patch.apply(edits)
            return edits

        def revert(self) -> None:
            patch.revert(patch.patched_files(self.source()))

    return Small()


def test_there_and_back(small):
    before = contents(small.write().root)
    (edit,) = small.patch()
    assert edit.original.read_bytes() == before[MODULE] and edit.file.read_bytes() == edit.after != before[MODULE]
    small.revert()
    assert contents(small.root) == before
    small.patch()  # as often as one likes


def test_twice_is_refused(small):
    small.write().patch()
    with pytest.raises(UsageError, match=r"there is nothing to patch; patched by eyas: .*wrapper\.py"):
        small.plan()


def test_another_class_in_a_patched_file_is_refused(small):
    body = WRAPPER[WRAPPER.index("class ") : WRAPPER.index("EntryClass")]
    both = WRAPPER.replace(body, body + body.replace("class Wrapper", "class Second"))
    small.write(wrapper=both.replace("EntryClass = [", "EntryClass = [SecondForConditionalGeneration, ")).patch()
    with pytest.raises(UsageError, match=r"wrapper\.py is patched already; eyas patch --revert restores it first"):
        small.plan({**WRAPPED, "architectures": ["SecondForConditionalGeneration"]})


def test_only_the_graphs_of_a_model_that_lacks_nothing(small):
    """Pull request 22836 is about every target of these versions."""
    (edit,) = small.write(LATE).plan(pairs.TARGET)
    assert edit.name == GRAPHS
    assert b"set_eagle3_layers_to_capture(self.model_runner.eagle_aux_hidden_state_layer_ids)" in edit.after


def test_nothing_is_lacking(small):
    with pytest.raises(
        UsageError, match=r"sglang 0.7.1 lacks nothing for LlamaForCausalLM: there is nothing to patch$"
    ):
        small.write().plan(pairs.TARGET)


def test_a_wrapper_around_nothing(small):
    empty = WRAPPER.replace("LlamaForCausalLM(config.text_config)", "nn.Linear(2, 2)")
    with pytest.raises(CannotPatchError, match="lacks set_eagle3_layers_to_capture and get_embed_and_head, and"):
        small.write(wrapper=empty).plan()


def test_a_forward_that_goes_around_the_model(small):
    around = WRAPPER.replace("language_model=self.language_model)", "language_model=self.language_model.model)")
    with pytest.raises(CannotPatchError, match="its forward goes around LlamaForCausalLM"):
        small.write(wrapper=around).plan()


def test_chosen_at_run_time(small):
    proxy = WRAPPER.replace("    def forward", "    def __getattr__(self, name):\n        return 1\n\n    def forward")
    with pytest.raises(CannotPatchError, match="eyas launch decides it at the start instead"):
        small.write(wrapper=proxy).plan()


def test_an_architecture_of_another_engine(small):
    with pytest.raises(CannotPatchError, match="registers no NovaForCausalLM"):
        small.write().plan({**WRAPPED, "architectures": ["NovaForCausalLM"]})


def test_a_wrapper_that_cannot_be_parsed(small):
    small.write(wrapper=WRAPPER.replace("EntryClass = [", "EntryClass = [("))
    line = small.file.read_text().splitlines().index("EntryClass = [(WrapperForConditionalGeneration]") + 1
    with pytest.raises(EyasError, match=rf"{MODULE} cannot be parsed: .*, line {line}$"):
        small.plan()


def test_a_miniature_of_vllm(small):
    write(small.root, VLLM)
    (edit,) = small.plan({**WRAPPED, "architectures": ["SilentForConditionalGeneration"]}, "vllm")
    assert "supports_eagle3 = True" in edit.after.decode()
    with pytest.raises(CannotPatchError, match="it must inherit from EagleModelMixin"):
        small.plan({**WRAPPED, "architectures": ["HollowForConditionalGeneration"]}, "vllm")


@pytest.mark.parametrize("style", ["crlf", "bom", "tabs", "latin"])
def test_whatever_a_file_looks_like(small, style):
    small.write()
    text = small.file.read_text()
    content = {
        "crlf": text.replace("\n", "\r\n").encode(),
        "bom": b"\xef\xbb\xbf" + text.encode(),
        "tabs": text.replace("    ", "\t").encode(),
        "latin": b"# -*- coding: utf-8 -*-\n# \xc3\xa9 \xe2\x80\x94\n" + text.encode(),
    }[style]
    small.file.write_bytes(content)
    small.patch()
    after = small.file.read_bytes()
    compile(after, "wrapper.py", "exec")
    lost = [line for line in content.splitlines(keepends=True) if line not in after.splitlines(keepends=True)]
    assert not lost and len(after) > len(content)
    if style == "crlf":
        assert after.count(b"\n") == after.count(b"\r\n")
    small.revert()
    assert small.file.read_bytes() == content


def test_changed_in_between(small):
    (edit,) = small.write().plan()
    small.file.write_bytes(edit.before + b"\n")
    with pytest.raises(EyasError, match="was changed while it was looked at; nothing was written"):
        patch.apply([edit])


def test_permissions_and_hard_links(small, tmp_path):
    """uv links files of an environment to its cache, which other environments share."""
    small.write()
    small.file.chmod(0o640)
    shared = tmp_path / "shared.py"
    os.link(small.file, shared)
    before = shared.read_bytes()
    (edit,) = small.patch()
    assert shared.read_bytes() == before and edit.file.stat().st_mode & 0o777 == 0o640
    small.revert()
    assert edit.file.stat().st_mode & 0o777 == 0o640


def test_changed_since(small):
    (edit,) = small.write().patch()
    edit.file.write_bytes(edit.after + b"# mine\n")
    with pytest.raises(EyasError, match=r"wrapper.py was changed after it was patched; nothing was restored"):
        small.revert()
    assert edit.file.read_bytes() == edit.after + b"# mine\n" and edit.original.exists()


def test_one_file_changed_since_and_none_is_restored(small):
    edits = small.write(LATE).patch()
    edits[1].file.write_bytes(b"x = 1\n")
    with pytest.raises(EyasError, match="nothing was restored"):
        small.revert()
    assert edits[0].file.read_bytes() == edits[0].after


@pytest.mark.parametrize("upgrade", ["another", "again"])
def test_an_upgrade_of_the_engine(small, upgrade):
    """The file was replaced: nothing of the patch is in it, so its record must stand in nobody's way."""
    (edit,) = small.write().patch()
    new = edit.before if upgrade == "again" else edit.before.replace(b"class Wrapper", b"# new\nclass Wrapper")
    edit.file.write_bytes(new)
    with pytest.raises(UsageError, match=r"wrapper\.py is patched already"):
        small.plan()
    assert patch.drop_stale(small.source()) == [edit.file] and patch.drop_stale(small.source()) == []
    assert edit.file.read_bytes() == new and not edit.record.exists() and not edit.original.exists()
    (again,) = small.patch()
    small.revert()
    assert again.file.read_bytes() == new


def test_what_is_still_patched_is_not_forgotten(small):
    first, second = small.write(LATE).patch()
    assert patch.drop_stale(small.source()) == []
    second.file.write_bytes(second.after + b"# mine\n")  # somebody's change on top of it
    assert patch.drop_stale(small.source()) == []
    first.file.unlink()
    assert patch.drop_stale(small.source()) == []
    second.file.write_bytes(second.after)
    small.revert()
    assert first.file.read_bytes() == first.before and second.file.read_bytes() == second.before


@pytest.mark.parametrize("damage", ["missing", "other", "record", "empty record"])
def test_a_damaged_backup(small, damage):
    (edit,) = small.write().patch()
    if damage == "missing":
        edit.original.unlink()
    elif damage == "other":
        edit.original.write_bytes(b"x = 1\n")
    else:
        edit.record.write_text("{" if damage == "record" else "[]")
    with pytest.raises(EyasError, match="nothing was restored"):
        small.revert()
    assert edit.file.read_bytes() == edit.after


@pytest.mark.parametrize("step", range(6))
def test_a_crash_in_between_leaves_nothing(small, monkeypatch, step):
    """Two files, three writes each: whichever fails, all is as it was."""
    before = contents(small.write(LATE).root)
    edits, count, write_file = small.plan(), iter(range(100)), patch._write

    def failing(*args):
        if next(count) == step:
            raise OSError("no space left on device")
        write_file(*args)

    monkeypatch.setattr(patch, "_write", failing)
    with pytest.raises(OSError, match="no space"):
        patch.apply(edits)
    assert contents(small.root) == before


@pytest.mark.parametrize("step", range(6))
def test_killed_in_between(small, monkeypatch, step):
    """Before whichever write: what is patched is restored, and nothing stays beside it."""
    before = contents(small.write(LATE).root)
    edits, count = small.plan(), iter(range(100))
    with monkeypatch.context() as killed:
        writing = patch._write
        killed.setattr(patch, "_write", lambda *args: sys.exit() if next(count) == step else writing(*args))
        killed.setattr(patch, "_restore", lambda *args: None)  # nobody is left to do it
        with pytest.raises(SystemExit):
            patch.apply(edits)
    assert contents(small.root) != before or step == 0
    patch.drop_stale(small.source())
    small.revert()
    assert contents(small.root) == before


def test_killed_while_it_is_restored(small, monkeypatch):
    before = contents(small.write(LATE).root)
    small.patch()
    with monkeypatch.context() as killed:
        unlink, count = Path.unlink, iter(range(100))
        killed.setattr(Path, "unlink", lambda *a, **k: sys.exit() if next(count) == 1 else unlink(*a, **k))
        with pytest.raises(SystemExit):
            small.revert()
    patch.drop_stale(small.source())
    small.revert()
    assert contents(small.root) == before


def test_a_wheel_is_not_patched(tmp_path):
    place = tmp_path / "sglang-0.7.1-py3-none-any.whl"
    root = write(tmp_path / "engine", SGLANG, sglang__srt__models__wrapper=WRAPPER)
    with ZipFile(place, "w") as archive:
        for file in root.rglob("*.py"):
            archive.write(file, file.relative_to(root))
    with pytest.raises(UsageError, match="is a wheel; a patch is for an installed engine"):
        patch.plan(open_engine("sglang", place), open_target(pairs.target(tmp_path / "target", WRAPPED)))


def test_without_libcst(small, monkeypatch):
    small.write()
    real = builtins.__import__
    monkeypatch.delitem(sys.modules, "eyas.bridges.rewriting", raising=False)

    def without(name, *args, **kwargs):
        if name.startswith("libcst"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EyasError, match=r"needs libcst, which is not installed: pip install 'eyas\[patch\]'"):
        small.plan()
