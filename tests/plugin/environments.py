"""Other interpreters: those that have an engine, or what an engine needs. Without one, its tests are skipped."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from bridges.wheels import wheel

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
ENTRY_POINTS = """
[sglang.srt.plugins]
eyas = eyas_plugin.entry:sglang

[vllm.general_plugins]
eyas = eyas_plugin.entry:vllm
"""


def vllm() -> Path:
    """$EYAS_VLLM_PYTHON, or what ``make peers`` made."""
    python = Path(os.environ.get("EYAS_VLLM_PYTHON") or ROOT / "build" / "peers-vllm" / "bin" / "python")
    if not python.is_file():
        pytest.skip(f"NOT TESTED IN THE REAL vLLM: no {python}; `make peers` makes it, or set EYAS_VLLM_PYTHON")
    return python


def sglang(version: str) -> Path:
    """$EYAS_SGLANG_ENVIRONMENTS/VERSION: PyTorch, the transformers this SGLang pins, and its other pure packages."""
    folder = Path(os.environ.get("EYAS_SGLANG_ENVIRONMENTS") or ROOT / "build" / "peers-sglang")
    python = folder / version / "bin" / "python"
    if not python.is_file():
        pytest.skip(
            f"NOT TESTED ON SGLANG'S REAL CLASSES: no {python}; see docs/engines.md, or EYAS_SGLANG_ENVIRONMENTS"
        )
    return python


@cache
def sglang_source(version: str, place: Path) -> Path:
    """The wheel, unpacked as pip would."""
    with ZipFile(wheel(f"sglang-{version}")) as archive:
        archive.extractall(place, [n for n in archive.namelist() if n.startswith("sglang/") and not n.endswith(".so")])
    return place


def installed(place: Path) -> Path:
    """A folder for the path, on which the plugin counts as installed: its metadata are there."""
    info = place / "eyas_plugin-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: eyas-plugin\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return place


def run(python: Path, script: str, *arguments: object, path: list[Path], **variables: str) -> list[Any]:
    """The JSON objects that a script of this folder prints."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("EYAS_PLUGIN", "SGLANG_", "VLLM_", "PYTHON"))}
    paths = os.pathsep.join(map(str, [ROOT / "plugin" / "src", HERE, *path]))
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": paths}
    ran = subprocess.run(
        [python, HERE / script, *map(str, arguments)],
        env=inherited | offline | variables,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


def markers(folder: Path) -> list[dict[str, Any]]:
    assert not list(folder.glob(".*")), "something half written was left"
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
