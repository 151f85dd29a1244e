"""What a target's folder says: its config.json, and the sizes of the language model inside it. No weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.core import TargetError, UsageError
from eyas.files import read_json

INNER = ("text_config", "llm_config", "language_config", "thinker_config", "text_cfg")  # where wrappers keep the model


@dataclass(frozen=True)
class Target:
    folder: Path
    config: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        named = self.config.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else ""

    @property
    def text(self) -> Mapping[str, Any]:
        """The part of the config that describes the language model."""
        config = self.config
        while inner := next((config[key] for key in INNER if isinstance(config.get(key), dict)), None):
            config = inner
        return config

    def size(self, key: str) -> int | None:
        """A positive integer of the language model's config, None where it is missing or something else."""
        value = self.text.get(key, self.config.get(key))
        return value if type(value) is int and value > 0 else None

    @property
    def layers(self) -> int | None:
        return self.size("num_hidden_layers")


def open_target(name: str | Path) -> Target:
    """The target of a folder with a config.json, or ``smollm2``. Raises UsageError for anything else."""
    if str(name) == "smollm2" and not Path(name).exists():
        from eyas.target.smollm2 import smollm2_folder

        name = smollm2_folder()
    folder = Path(name).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} {what}; a target to check is a folder with its config.json (weights are not read)")
    file = folder / "config.json"
    if not file.is_file():
        raise UsageError(f"{folder} is not a model folder: it has no config.json")
    return Target(folder, read_json(file, TargetError))
