"""Finding an engine, and reading it: wheels, environments, source trees, and all that is none of these."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from bridges.engines import SGLANG, write

from eyas.bridges.code.source import SourceError, engine_at, open_engine
from eyas.core import EyasError, UsageError

METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: {}\nRequires-Dist: transformers==4.57.1\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write(tmp_path / "tree", SGLANG)


def wheel(path: Path, root: Path, name: str = "sglang", version: str = "0.7.1") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(root.rglob("*.py")):
            archive.write(file, file.relative_to(root).as_posix())
        archive.writestr(f"{name}-{version}.dist-info/METADATA", METADATA.format(name, version))
        archive.writestr(f"{name}-{version}.dist-info/RECORD", "sglang/__init__.py,,\n")
    return path


def test_a_source_tree(tree):
    source = open_engine("sglang", tree)
    assert (source.version, source.release) == ("0.7.1", (0, 7, 1))
    assert source.module("sglang.srt.models.llama") == "sglang/srt/models/llama.py"
    assert source.module("sglang") == "sglang/__init__.py" and source.module("sglang.no.such") is None
    assert source.short("sglang/srt/models/llama.py") == "models/llama.py"
    assert source.find("sglang/srt/models/llama.py") == source.text("sglang/srt/models/llama.py")
    assert source.find("sglang/srt/models/none.py") is None


@pytest.mark.parametrize("inside", ["python", "src", "lib/python3.11/site-packages"])
def test_a_repository_and_an_environment(tree, tmp_path, inside):
    (tmp_path / "root" / inside).parent.mkdir(parents=True)
    tree.rename(tmp_path / "root" / inside)
    assert open_engine("sglang", tmp_path / "root").version == "0.7.1"


def test_the_package_itself(tree):
    assert open_engine("sglang", tree / "sglang").version == "0.7.1"


def test_a_wheel_is_read_as_it_is(tree, tmp_path):
    source = open_engine("sglang", wheel(tmp_path / "sglang-0.7.2-py3-none-any.whl", tree, version="0.7.2"))
    assert source.version == "0.7.2" and source.requires("transformers") == "4.57.1" and source.requires("torch") == ""
    assert "class LlamaForCausalLM" in source.text("sglang/srt/models/llama.py")


def test_a_distribution_of_another_name_owns_the_package(tree, tmp_path):
    source = open_engine("sglang", wheel(tmp_path / "w.whl", tree, name="sglang_cpu", version="3"))
    assert source.version == "3" and source.release == (3,)


def test_a_neighbour_with_a_similar_name_does_not(tree):
    folder = tree / "sglang_kernel-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(METADATA.format("sglang-kernel", "9.9"))
    (folder / "RECORD").write_text("sglang_kernel/__init__.py,,\n")
    assert open_engine("sglang", tree).version == "0.7.1"


def test_no_version_at_all(tree):
    (tree / "sglang/version.py").unlink()
    source = open_engine("sglang", tree)
    assert source.release is None and source.label == "sglang (version unknown)"


def test_whichever_engine_is_there(tree):
    assert engine_at(tree).name == "sglang"


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda tree: tree / "none", UsageError, "no such file or folder"),
        (lambda tree: tree / "sglang/version.py", UsageError, "not a wheel"),
        (lambda tree: tree.parent, UsageError, "expected sglang in it"),
        (lambda tree: [p.write_text("") for p in tree.rglob("*.py")] and tree, EyasError, "knows no EAGLE-3"),
    ],
)
def test_what_is_no_engine(tree, change, kind, words):
    with pytest.raises(kind, match=words) as caught:
        open_engine("sglang", change(tree))
    assert "\n" not in str(caught.value)


def test_a_wheel_of_something_else(tree, tmp_path):
    other = write(tmp_path / "other", {"numpy/__init__.py": ""})
    with pytest.raises(UsageError, match="a wheel of numpy, not of sglang"):
        open_engine("sglang", wheel(tmp_path / "numpy.whl", other, name="numpy"))
    with pytest.raises(UsageError, match="holds none of sglang, vllm"):
        engine_at(tmp_path / "numpy.whl")


def test_the_other_engine(tree):
    with pytest.raises(UsageError, match="expected vllm in it, found sglang"):
        open_engine("vllm", tree)


def test_nothing_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="vllm is not installed here"):
        open_engine("vllm")


def test_a_byte_order_mark(tree):
    file = tree / "sglang/srt/models/marked.py"
    file.write_bytes(b"\xef\xbb\xbfA = 1\n")
    assert open_engine("sglang", tree).tree("sglang/srt/models/marked.py").body


@pytest.mark.parametrize("content", [b"def (:\n", b"\xff\xfe\n", b"x = " + b"(" * 5000, b"\x00"])
def test_a_module_that_is_no_python(tree, content):
    (tree / "sglang/srt/models/odd.py").write_bytes(content)
    with pytest.raises(SourceError, match=r"odd\.py"):
        open_engine("sglang", tree).tree("sglang/srt/models/odd.py")


def test_an_unreadable_file(tree, monkeypatch):
    source = open_engine("sglang", tree)

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(SourceError, match=r"llama.py cannot be read: .*Permission denied"):
        source.text("sglang/srt/models/llama.py")


def test_a_broken_archive(tree, tmp_path):
    path = wheel(tmp_path / "w.whl", tree)
    content = path.read_bytes()
    path.write_bytes(content[:200] + b"\x00" * 400 + content[600:])
    with pytest.raises(EyasError):
        source = open_engine("sglang", path)
        for module in source.modules:
            source.text(module)


def test_no_torch_and_nothing_of_the_engine_is_imported(tree):
    code = (
        f"import sys; from eyas.bridges.check import check; from eyas.bridges.code.source import open_engine; "
        f"open_engine('sglang', {str(tree)!r}); "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers', 'sglang', 'vllm')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
