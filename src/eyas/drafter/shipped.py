"""The drafters that come with Eyas, by the name of the target they were raised for."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / "drafters"
SHIPPED = {"smollm2": "smollm2-135m-instruct-eagle3"}


def shipped_drafter(target: str) -> Path | None:
    """The folder of the drafter shipped for ``target``; None where there is none (yet)."""
    folder = FOLDER / SHIPPED[target] if target in SHIPPED else None
    return folder if folder is not None and (folder / "config.json").is_file() else None
