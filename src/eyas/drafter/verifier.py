"""What a drafter's files say of its target, from the target's config.json alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.core import CheckpointError
from eyas.drafter.config import Eagle3Config
from eyas.files import read_json

_SIZES = ("hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings")


@dataclass(frozen=True)
class Verifier:
    """``name`` is how the target was named: what a speculators config gives vLLM to load."""

    name: str
    architectures: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    max_position_embeddings: int

    @staticmethod
    def read(place: str | Path) -> Verifier:
        """From a model folder. A wrapper's language model counts, not the wrapper (it may nest: omni models do).

        Raises CheckpointError where the folder has no config.json of a language model.
        """
        folder = Path(place).expanduser()
        raw = read_json(folder / "config.json", CheckpointError, "a target is a folder with config.json")
        for config in _outside_in(raw):
            sizes = {key: config.get(key) for key in _SIZES}
            if all(type(size) is int and size > 0 for size in sizes.values()):
                return Verifier(str(place), tuple(map(str, raw.get("architectures") or ())), **sizes)  # type: ignore[arg-type]
        raise CheckpointError(f"{folder / 'config.json'}: names no {', '.join(_SIZES)} of one language model")

    def mismatches(self, config: Eagle3Config) -> list[str]:
        return config.mismatches(self.hidden_size, self.vocab_size, f"{self.name} has")


def _outside_in(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    for inner in config.values():
        if isinstance(inner, dict):
            yield from _outside_in(inner)
