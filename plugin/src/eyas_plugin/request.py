"""What the environment asks for."""

from __future__ import annotations

import os

VARIABLE = "EYAS_PLUGIN"
AUTO = "auto"


def active() -> bool:
    return bool(asked())


def asked() -> str:
    return os.environ.get(VARIABLE, "").strip()


def names() -> set[str]:
    """The classes or architectures that are asked for by name; ``auto`` is one of them."""
    return {name for part in asked().split(",") if (name := part.strip())}
