"""An engine's own command line as keys and values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eyas.core import UsageError, one_line


@dataclass(frozen=True)
class Given:
    """What an engine is told: its arguments, and the settings in the file behind --config, which arguments override."""

    arguments: tuple[str, ...]
    file: Mapping[str, Any]

    @staticmethod
    def read(arguments: Sequence[str], whole: Iterable[str]) -> Given:
        """``whole``: flags that are read here too, and that argparse would also know by a beginning.

        Raises UsageError for such a beginning, and for a file that cannot be read.
        """
        file = _file(arguments)
        refuse_abbreviations([*arguments, *(f"--{name}" for name in file)], whole)
        return Given(tuple(arguments), {_key(name): value for name, value in file.items()})


def read_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """``--page-size 64`` and ``--page-size=64`` are page_size 64, JSON is read.

    A flag without a value is True, one with several values is a list. Raises UsageError for a value without a flag and
    for broken JSON.
    """
    found: dict[str, Any] = {}
    name, values = "", list[Any]()
    for argument in arguments:
        if argument.startswith("-") and not _is_number(argument):
            name, given, value = argument.lstrip("-").partition("=")
            found[_key(name)] = _value(name, value) if given else True
            name, values = "" if given else name, []
        elif name:
            values.append(_value(name, argument))
            found[_key(name)] = values[0] if len(values) == 1 else values
        else:
            raise UsageError(f"unexpected argument {argument!r}; the engine's own flags go behind --")
    return found


def refuse_abbreviations(arguments: Iterable[str], whole: Iterable[str]) -> None:
    """Raises UsageError for a flag that argparse would complete to one of ``whole``, each with its dashes."""
    names = list(whole)
    for argument in arguments:
        said = argument.partition("=")[0].partition(".")[0]
        flag = said.replace("_", "-")
        meant = [name for name in names if name.startswith(flag)]
        if meant and flag.strip("-") and flag not in names:
            raise UsageError(f"{said}: write {' or '.join(meant)} out, which has to be known before the engine starts")


def refuse_another(name: str, given: Given, target: Path) -> None:
    """Raises UsageError where ``name`` in the file is another target than the one that is launched."""
    said = given.file.get(name)
    if said is not None and Path(str(said)).expanduser().resolve() != target.resolve():
        raise UsageError(f"--config: {name} in the file is {said}, and TARGET says {target}; give it once")


def _file(arguments: Sequence[str]) -> dict[str, Any]:
    """What stands in the file behind --config, nothing without one."""
    if joined := next((argument for argument in arguments if argument.startswith("--config=")), ""):
        raise UsageError(f"{joined}: engines read no file behind an equals sign; write --config {joined[9:]}")
    if "--config" not in arguments[:-1]:
        return {}
    file = arguments[list(arguments).index("--config") + 1]
    try:
        said = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"--config {file} cannot be read: {one_line(error)}") from error
    if not isinstance(said, dict):
        raise UsageError(f"--config {file}: expected flags and their values, found {type(said).__name__}")
    return {str(name): value for name, value in said.items()}


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
