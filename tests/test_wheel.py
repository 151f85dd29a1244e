"""A wheel of Eyas, built from a copy of the tree and used without it: all that Eyas needs of its own is in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from eyas.drafter.shipped import SHIPPED

ROOT = Path(__file__).resolve().parents[1]
# What pip calls; not compressed, for the sake of time.
BUILD = """
import sys
from setuptools.build_meta import build_wheel
build_wheel(sys.argv[1], {"--build-option": ["--compression=stored"]})
"""
NEEDED = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "src", "drafters", "plugin")
LITTER = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", ".*")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel is built from, and nothing else: building leaves things behind."""
    if (found := setuptools()) < 77:
        pytest.skip(f"NO WHEEL IS TESTED: building one needs setuptools 77, this environment has {found or 'none'}")
    tree = tmp_path_factory.mktemp("tree")
    for name in NEEDED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=LITTER)
        else:
            shutil.copy(ROOT / name, tree / name)
    return tree


@pytest.fixture(scope="module")
def unpacked(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("wheels")
    ran = subprocess.run([sys.executable, "-c", BUILD, str(built)], cwd=tree, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    (wheel,) = built.iterdir()
    assert wheel.name.startswith("eyas-") and wheel.name.endswith("-py3-none-any.whl")
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def setuptools() -> int:
    try:
        return int(version("setuptools").partition(".")[0])
    except PackageNotFoundError:
        return 0


def contents(folder: Path, *under: str) -> dict[str, bytes]:
    """Files by their paths in ``folder``."""
    files = (path for name in under for path in (folder / name).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files if "__pycache__" not in path.parts}


def test_it_carries_what_the_tree_has(tree: Path, unpacked: Path) -> None:
    package = contents(unpacked, "eyas")
    expected = contents(tree / "src", "eyas")
    beside = contents(tree, "drafters", "plugin")
    assert any(name.endswith(".safetensors") for name in beside) and "plugin/pyproject.toml" in beside
    expected |= {f"eyas/shipped/{name}": content for name, content in beside.items()}
    assert package.keys() == expected.keys()
    assert all(package[name] == content for name, content in expected.items())
    top = {path.name for path in unpacked.iterdir()}
    assert "eyas" in top and len(top) == 2 and any(name.endswith(".dist-info") for name in top)


LOOK = """
import json, pathlib, sys
import eyas
from eyas.bridges import plugin
from eyas.drafter.inspect import describe
from eyas.drafter.shipped import shipped_drafter
drafter, place = shipped_drafter("smollm2"), plugin.place()
plugin.lay_out(place)
said = {"eyas": eyas.__file__, "drafter": str(drafter), "dialect": describe(drafter).dialect, "plugin": str(place)}
print(json.dumps(said))
"""


def test_the_drafter_and_the_plugin_are_found_in_it(unpacked: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(unpacked), "EYAS_CACHE": str(tmp_path / "cache")}
    ran = subprocess.run([sys.executable, "-c", LOOK], cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert Path(said["eyas"]) == unpacked / "eyas" / "__init__.py"
    assert Path(said["drafter"]) == unpacked / "eyas" / "shipped" / "drafters" / SHIPPED["smollm2"]
    assert said["dialect"] == "sglang"
    laid_out = Path(said["plugin"])
    assert laid_out.is_relative_to(tmp_path / "cache")
    assert contents(laid_out, "eyas_plugin") == contents(ROOT / "plugin" / "src", "eyas_plugin")
    assert list(laid_out.glob("eyas_plugin-*.dist-info/entry_points.txt"))


def test_a_tree_without_drafters_makes_no_wheel(tree: Path, tmp_path: Path) -> None:
    lacking = tmp_path / "lacking"
    shutil.copytree(tree, lacking, ignore=shutil.ignore_patterns("drafters", "build"))
    ran = subprocess.run([sys.executable, "-c", BUILD, str(tmp_path)], cwd=lacking, capture_output=True, text=True)
    assert ran.returncode != 0 and "drafters/*/*: nothing there" in ran.stderr
    assert not list(tmp_path.glob("*.whl"))
