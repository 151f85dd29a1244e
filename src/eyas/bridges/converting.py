"""What eyas convert would refuse, asked before a conversion is promised."""

from __future__ import annotations

from collections.abc import Iterator

from eyas.bridges.code.source import EngineSource
from eyas.bridges.report import Problem
from eyas.core import UsageError
from eyas.drafter.checkpoint import Checkpoint
from eyas.drafter.convert import losses
from eyas.drafter.dialects import Reading


def refusals(checkpoint: Checkpoint, reading: Reading, dialect: str, source: EngineSource) -> Iterator[Problem]:
    """Why the drafter cannot be written for this engine without another computation."""
    try:
        reasons = list(reading.problems) or losses(checkpoint, reading, dialect, source.find)
    except UsageError as error:
        reasons = [str(error)]
    for reason in reasons:
        yield Problem(
            "fails",
            reason,
            f"eyas convert --to {dialect} refuses it: {source.label} would compute something else than was trained",
            "run it with an engine that can, or train without it",
        )
