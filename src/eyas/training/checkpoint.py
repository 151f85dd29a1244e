"""A training's state on disk: whole or not at all, and enough of it to go on as if nothing had happened."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from eyas.core import one_line
from eyas.files import whole
from eyas.training.config import TrainConfig, TrainingError

FOLDER, FILE, FORMAT = "checkpoint", "state.pt", 1


@dataclass
class State:
    """Where a training is. What follows from it is a function of this, the data and the target."""

    config: dict[str, Any]  # TrainConfig, settled
    data: dict[str, Any]  # what the data must still be
    step: int = 0  # updates done
    tokens: int = 0
    seconds: float = 0.0
    best: dict[str, Any] | None = None  # the evaluation of the drafter that was kept
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)


def save(folder: Path, state: State) -> None:
    """Replaces the checkpoint in ``folder``. Raises TrainingError where it cannot, and the one before is kept."""
    path = folder / FOLDER / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as draft, draft.open("wb") as file:  # at no time is there none
            torch.save({"format": FORMAT, **vars(state)}, file)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError where the disk is full
        raise TrainingError(
            f"The checkpoint of step {state.step:,} cannot be written to {folder}: {one_line(error)}. "
            "The one before it is kept: make room, and resume."
        ) from error


def exists(folder: Path) -> bool:
    return (folder / FOLDER / FILE).is_file()


def load(folder: Path) -> State:
    """Raises TrainingError where there is none, or none that can be read."""
    path = folder / FOLDER / FILE
    if not path.is_file():
        raise TrainingError(
            f"{folder} holds no training to resume: there is no {FOLDER}/{FILE}; start without --resume."
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content.pop("format") != FORMAT:
            raise ValueError("it was written by another version of Eyas")
        return State(**content)
    except Exception as error:
        raise TrainingError(
            f"{path} cannot be read: {one_line(error)}. Restore it, or start another training from "
            "the drafter beside it, if there is one (--drafter, and another --out)."
        ) from error


def begun(config: TrainConfig, data: dict[str, Any]) -> State:
    return State(asdict(config), data)
