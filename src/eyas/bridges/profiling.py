"""How an engine is told to profile itself: what it is launched with, and what is asked of it while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Profiling:
    """``flags`` and ``variables`` come on top of its command; ``asked`` is the body of its POST /start_profile.

    ``ends``: it stops by itself after the steps that were asked for. A trace whose name holds ``whole`` has just these
    steps; "" where no name tells.
    """

    flags: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)
    ends: bool = True
    whole: str = ""
