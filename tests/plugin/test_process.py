"""What the plugin does to a process: nothing unless it is asked, and then as late as it can; and the proof of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from eyas_plugin import request, resolving
from eyas_plugin.imports import when_imported
from eyas_plugin.marker import Marker
from eyas_plugin.wrappers import Interface
from plugin.environments import ENTRY_POINTS, ROOT, markers


def python(code: str, **variables: str) -> str:
    environment = {"PYTHONPATH": str(ROOT / "plugin" / "src"), "PATH": os.environ["PATH"], **variables}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


BOTH = "import sys\nfrom eyas_plugin.entry import sglang, vllm\nsglang(); vllm()\n"
SEEN = "print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'sglang', 'vllm', 'eyas_plugin')))"


@pytest.mark.parametrize("asked", [{}, {"EYAS_PLUGIN": ""}, {"EYAS_PLUGIN": "  "}])
def test_inactive(asked, tmp_path):
    seen = python(BOTH + SEEN, **asked, EYAS_PLUGIN_MARKERS=str(tmp_path / "markers"))
    assert seen.strip() == "['eyas_plugin', 'eyas_plugin.entry', 'eyas_plugin.request']"
    assert not (tmp_path / "markers").exists()


def test_active_imports_no_engine(tmp_path):
    """Twice, as vLLM may: one hook for each registry, one marker for each engine."""
    code = BOTH + "sglang(); vllm()\n" + SEEN + "\nprint(sum(type(f).__name__ == '_Finder' for f in sys.meta_path))"
    seen, hooks = python(code, EYAS_PLUGIN="auto", EYAS_PLUGIN_MARKERS=str(tmp_path)).splitlines()
    assert not re.search("torch|'sglang|'vllm", seen) and hooks == "2"
    found = markers(tmp_path)
    assert [m["engine"] for m in found] == ["sglang", "vllm"] and len({m["pid"] for m in found}) == 1
    assert all(m["asked"] == "auto" and m["classes"] == {} for m in found)


def test_the_entry_points_are_those_of_the_distribution():
    said = (ROOT / "plugin" / "pyproject.toml").read_text()
    for group, function in re.findall(r"\[([\w.]+)\]\neyas = (\S+)", ENTRY_POINTS):
        assert f'[project.entry-points."{group}"]\neyas = "{function}"' in said
    assert "dependencies = []" in said


@pytest.mark.parametrize(
    ("asked", "names"), [("auto", {"auto"}), (" A, B ,", {"A", "B"}), ("", set()), ("auto,A", {"auto", "A"})]
)
def test_what_is_asked(monkeypatch, asked, names):
    monkeypatch.setenv("EYAS_PLUGIN", asked)
    assert request.names() == names and request.active() == bool(names)


# Imports


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that nobody has imported yet."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"module_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("import sys\nvalue = 1\nif getattr(sys, 'eyas_fails', False): raise OSError\n")
    finders = list(sys.meta_path)
    yield name
    sys.modules.pop(name, None)
    sys.meta_path[:] = finders


def test_as_soon_as_it_is_imported(module):
    seen = []
    when_imported(module, lambda m: seen.append(m.value))
    when_imported(module, lambda m: seen.append("again"))
    assert find_spec(module) is not None and seen == []  # looking for it is not importing it
    imported = __import__(module)
    assert seen == [1] and imported.__spec__.loader is imported.__loader__
    assert type(imported.__loader__).__module__.startswith("_frozen") or "Source" in type(imported.__loader__).__name__
    assert not any(type(f).__name__ == "_Finder" for f in sys.meta_path)
    when_imported(module, lambda m: seen.append("at once"))
    assert seen == [1, "at once"]


def test_an_import_that_fails_first(module, monkeypatch):
    seen = []
    when_imported(module, lambda m: seen.append(m.value))
    monkeypatch.setattr(sys, "eyas_fails", True, raising=False)
    with pytest.raises(OSError):
        __import__(module)
    monkeypatch.setattr(sys, "eyas_fails", False)
    __import__(module)
    assert seen == [1]


def test_a_module_that_does_not_exist():
    when_imported("no_such_module_anywhere", lambda m: None)
    with pytest.raises(ModuleNotFoundError):
        __import__("no_such_module_anywhere")
    sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "_Finder"]


# Resolving, and the marker


class Model:
    def __init__(self):
        pass


def registry(*models: type):
    class Registry:
        def resolve_model_cls(self, architectures, **_):
            found = {model.__name__: model for model in models}
            return found[architectures[0]], architectures[0]

    return SimpleNamespace(__name__="sglang.srt.models.registry", ModelRegistry=Registry())


def engine(target: bool = True, **changes) -> resolving.Engine:
    return resolving.Engine(
        Marker("sglang", "0.0"),
        lambda: Interface("SGLang", ("ready",)),
        lambda *a, **k: target,
        lambda: target,
        **changes,
    )


@pytest.mark.parametrize(("asked", "taken"), [("Model", True), ("Other", False), ("auto", True), ("auto, Other", True)])
def test_who_is_asked_for(monkeypatch, tmp_path, asked, taken):
    monkeypatch.setenv("EYAS_PLUGIN", asked)
    monkeypatch.setenv("EYAS_PLUGIN_MARKERS", str(tmp_path))
    cls = type("Model", (Model,), {})
    place, chosen = registry(cls), engine()
    resolving.hook(place, chosen)
    resolving.hook(place, engine())  # by another way, as with an external package and an entry point
    for _ in range(2):
        assert place.ModelRegistry.resolve_model_cls(["Model"]) == (cls, "Model")
    assert hasattr(cls, "ready") == taken
    (marker,) = markers(tmp_path)
    assert marker["left_alone"] == ([] if taken else ["Model"])
    assert marker["classes"] == ({"Model": {"added": ["ready"], "repaired": []}} if taken else {})


def test_automatic_leaves_a_server_without_speculation_alone(monkeypatch):
    monkeypatch.setenv("EYAS_PLUGIN", "auto")
    cls = type("Model", (Model,), {})
    place = registry(cls)
    chosen = resolving.Engine(
        Marker("vllm", "0"), lambda: Interface("vLLM", ("ready",)), lambda *a, **k: True, lambda: False
    )
    resolving.hook(place, chosen)
    place.ModelRegistry.resolve_model_cls(["Model"])[0]()
    assert chosen.marker.refused == ""


def test_an_engine_without_such_a_place():
    with pytest.raises(RuntimeError, match=r"does not know this sglang 0.0, which has no .*resolve_model_cls"):
        resolving.hook(SimpleNamespace(__name__="sglang.srt.models.registry", ModelRegistry=object()), engine())


def test_a_marker_is_whole_or_not_there(monkeypatch, tmp_path):
    folder = tmp_path / "deep" / "markers"
    monkeypatch.setenv("EYAS_PLUGIN_MARKERS", str(folder))
    marker = Marker("vllm", "0.32.0")
    marker.write()
    marker.refused = "because"
    marker.write()
    (file,) = folder.iterdir()
    assert file.name == f"vllm-{os.getpid()}.json" and json.loads(file.read_text())["refused"] == "because"
    monkeypatch.setenv("EYAS_PLUGIN_MARKERS", str(file))  # a launcher that cannot be told is not left waiting
    with pytest.raises(OSError):
        marker.write()


def test_a_forked_child_has_a_marker_of_its_own(tmp_path):
    code = (
        "import os\nfrom eyas_plugin.marker import Marker\n"
        "m = Marker('vllm', '1'); m.write(); pid = os.fork(); m.left_alone.append(str(pid == 0)); m.write()\n"
        "pid and os.waitpid(pid, 0)\n"
    )
    python(code, EYAS_PLUGIN_MARKERS=str(tmp_path))
    assert sorted(m["left_alone"] for m in markers(tmp_path)) == [["False"], ["True"]]


def test_no_folder_no_marker(monkeypatch, tmp_path):
    monkeypatch.delenv("EYAS_PLUGIN_MARKERS", raising=False)
    monkeypatch.chdir(tmp_path)
    Marker("vllm", "1").write()
    assert not list(Path().iterdir())
