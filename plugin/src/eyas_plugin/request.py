"""What the environment asks for."""

from __future__ import annotations

import os

VARIABLE = "EYAS_PLUGIN"
TRACE = "EYAS_PLUGIN_TRACE"
AUTO = "auto"


def active() -> bool:
    return bool(asked())


def asked() -> str:
    return os.environ.get(VARIABLE, "").strip()


def names() -> set[str]:
    """The classes or architectures that are asked for by name; ``auto`` is one of them."""
    return {name for part in asked().split(",") if (name := part.strip())}


def trace() -> str:
    """The folder that the drafter's calls are written to, "" where nobody wants to know."""
    return os.environ.get(TRACE, "").strip()
