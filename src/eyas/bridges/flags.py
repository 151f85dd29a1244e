"""An engine's own command line as keys and values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from eyas.core import UsageError


def read_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """``--page-size 64`` and ``--page-size=64`` are page_size 64, a flag without a value is True, JSON is read.

    Raises UsageError for a value without a flag and for broken JSON.
    """
    found: dict[str, Any] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("-") and not _is_number(argument):
            name, given, value = argument.lstrip("-").partition("=")
            found[_key(name)] = _value(name, value) if given else True
            name = "" if given else name
        elif name:
            found[_key(name)], name = _value(name, argument), ""
        else:
            raise UsageError(f"unexpected argument {argument!r}; the engine's own flags go behind --")
    return found


def _key(name: str) -> str:
    return name.replace("-", "_")


def _value(name: str, text: str) -> Any:
    if text.startswith("{"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise UsageError(f"--{name}: not valid JSON: {error}") from error
    if _is_number(text):
        return float(text) if "." in text else int(text)
    return text


def _is_number(text: str) -> bool:
    return text.lstrip("-").replace(".", "", 1).isdigit()
