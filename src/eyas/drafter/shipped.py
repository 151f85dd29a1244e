"""What comes with Eyas: drafters, by the name of the target they were raised for, and the engines' plugin."""

from __future__ import annotations

from pathlib import Path

from eyas.core import EyasError

_HERE = Path(__file__).resolve()
ROOTS = (_HERE.parents[1] / "shipped", _HERE.parents[3])  # in a wheel, where setup.py puts it; in a checkout
SHIPPED = {"smollm2": "smollm2-135m-instruct-eagle3"}


def shipped_drafter(target: str) -> Path | None:
    """The folder of the drafter shipped for ``target``; None where there is none (yet).

    Raises EyasError where there should be one, and is not.
    """
    if target not in SHIPPED:
        return None
    return shipped(f"drafters/{SHIPPED[target]}/config.json", "name another drafter, or none").parent


def shipped(path: str, otherwise: str) -> Path:
    """A file or folder that comes with Eyas, by its path in the repository. Raises EyasError where it is missing."""
    for root in ROOTS:
        if (found := root / path).exists():
            return found
    raise EyasError(
        f"{path}, which comes with Eyas, is neither in its package ({ROOTS[0]}) nor in a checkout around it "
        f"({ROOTS[1]}): install Eyas again, from a wheel or a whole checkout; or {otherwise}"
    )
