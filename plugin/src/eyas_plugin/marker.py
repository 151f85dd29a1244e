"""Proof that the plugin ran: one JSON file for each process, which a launcher reads.

    {"pid": 4711, "process": "EngineCore", "engine": "vllm", "version": "0.32.0", "plugin": "0.1.0", "asked": "auto",
     "classes": {"KimiVLForConditionalGeneration": {"added": ["supports_eagle3", ...], "repaired": [],
                                                    "through": "language_model: DeepseekV2ForCausalLM"}},
     "left_alone": ["LlamaForCausalLMEagle3"], "refused": ""}

``through`` is there as soon as a model of the class was made and found fit; ``refused`` says why one was not.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas_plugin import __version__
from eyas_plugin.request import asked

FOLDER = "EYAS_PLUGIN_MARKERS"


@dataclass
class Marker:
    """What was done in this process. A forked child goes on from its parent's, in a file of its own."""

    engine: str
    version: str
    classes: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_alone: list[str] = field(default_factory=list)
    refused: str = ""

    def write(self) -> None:
        """Raises OSError where the folder cannot be written to: a launcher would wait for it in vain."""
        folder = os.environ.get(FOLDER)
        if not folder:
            return
        pid, process = os.getpid(), multiprocessing.current_process().name
        said = {"pid": pid, "process": process, "plugin": __version__, "asked": asked(), **vars(self)}
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=folder, prefix=f".{pid}-", suffix=".tmp", delete=False
        ) as file:
            json.dump(said, file, indent=1)
        Path(file.name).replace(Path(folder) / f"{self.engine}-{pid}.json")
