"""What eyas convert would refuse, asked before a conversion is promised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from eyas.bridges.code.source import EngineSource
from eyas.bridges.report import Problem
from eyas.core import UsageError
from eyas.drafter import engines, writing
from eyas.drafter.dialects import Reading


def refusals(reading: Reading, dialect: str, source: EngineSource) -> Iterator[Problem]:
    """Why the drafter cannot be written for this engine without another computation."""
    config = reading.config
    config = replace(config, tied_head=config.tied_head and not config.own_embedding)  # else its head is written out
    reasons = list(reading.problems) or writing.cannot_say(config, dialect)
    if not reasons:
        try:
            reasons = engines.limits(config, dialect, source.find)
        except UsageError as error:
            reasons = [str(error)]
    for reason in reasons:
        yield Problem(
            "fails",
            reason,
            f"eyas convert --to {dialect} refuses it: {source.label} would compute something else than was trained",
            "run it with an engine that can, or train without it",
        )
