"""The plugin as a launcher sees it: put where an engine's processes import it, and asked what it did."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas import __version__
from eyas.drafter.shipped import shipped
from eyas.files import whole_folder
from eyas.target.smollm2 import cache_folder

PACKAGE, ASKED, MARKERS = "eyas_plugin", "EYAS_PLUGIN", "EYAS_PLUGIN_MARKERS"
ENTRY_POINTS = """\
[sglang.srt.plugins]
eyas = eyas_plugin.entry:sglang

[vllm.general_plugins]
eyas = eyas_plugin.entry:vllm
"""


def place() -> Path:
    """The folder for PYTHONPATH, of its own for every state of the plugin. Raises EyasError without the plugin."""
    files = sorted(_package().rglob("*.py"))
    content = hashlib.sha256(b"".join(file.read_bytes() for file in files) + ENTRY_POINTS.encode()).hexdigest()
    return cache_folder() / "plugin" / content[:12]


def lay_out(folder: Path) -> None:
    """The package, with the metadata by which engines find entry points."""
    with whole_folder(folder) as new:
        shutil.copytree(_package(), new / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
        about = new / f"{PACKAGE}-{__version__}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: eyas-plugin\nVersion: {__version__}\n")
        (about / "entry_points.txt").write_text(ENTRY_POINTS)


def _package() -> Path:
    return shipped(f"plugin/src/{PACKAGE}/__init__.py", "start with --no-plugin").parent


@dataclass(frozen=True)
class Said:
    """``proved``: it ran in the process that made the target's model, and saw to its class."""

    proved: bool
    text: str


def said(markers: Path, asked: str, supplied: Sequence[str]) -> Said:
    """What its marks say it did. ``supplied``: what it was to put right."""
    marks = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(markers.glob("*.json"))]
    lost = "".join(f"; so this is not put right: {evidence}" for evidence in supplied)
    if not marks:
        return Said(False, f"the plugin left no mark: it ran in no process of the engine{lost}")
    refused = next((mark["refused"] for mark in marks if mark["refused"]), "")
    if refused:
        return Said(False, refused)
    classes: dict[str, Mapping[str, Any]] = {}
    for name, done in (entry for mark in marks for entry in mark["classes"].items()):
        if name not in classes or "through" in done:  # said by the process that made the model
            classes[name] = done
    if not classes:
        processes = f"{len(marks)} process{'' if len(marks) == 1 else 'es'}"
        return Said(False, f"the plugin ran in {processes}, none of which looked up {asked}{lost}")
    told = "; ".join(_did(name, done) for name, done in classes.items())
    if unmade := [name for name, done in classes.items() if done["added"] and "through" not in done]:
        return Said(False, f"{told}; it ran in no process that made a {unmade[0]}{lost}")
    return Said(True, told)


def _did(name: str, done: Mapping[str, Any]) -> str:
    given = ", ".join([*done["added"], *done["repaired"]])
    through = f", passed on to {done['through']}" if "through" in done else ""
    return f"the plugin gave {name} {given}{through}" if given else f"the plugin found nothing missing in {name}"
