"""What the interpreter computes with: Python's own values, and stand-ins for what only exists in a running engine."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from eyas.bridges.code.classes import ClassRef, FunctionRef


class Nothing:
    """UNKNOWN: only a running engine could tell; what is computed from it is unknown too. ABSENT: no such attribute."""

    def __init__(self, name: str):
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def __bool__(self) -> bool:
        raise TypeError(f"{self._name} is neither true nor false: ask truth()")


UNKNOWN, ABSENT = Nothing("UNKNOWN"), Nothing("ABSENT")


@dataclass(eq=False)
class Either:
    """One of several values, by a condition that is not known."""

    options: list[Any]


@dataclass(eq=False)
class Record:
    """A config as an engine's object. ``closed``: keys that no config class has a default for."""

    values: dict[str, Any]
    closed: frozenset[str] = frozenset()
    asked: list[str] = field(default_factory=list)  # keys that were read though they are missing

    def get(self, name: str) -> Any:
        if name not in self.values:
            self.asked.append(name)
            return ABSENT if name in self.closed else UNKNOWN
        value = self.values[name]
        if isinstance(value, dict) and value.keys() & {"model_type", "hidden_size", "num_hidden_layers"}:
            value = self.values[name] = Record(value, self.closed)  # a config within the config
        return value

    def text_config(self) -> Record:
        """What transformers' get_text_config() gives: the config itself, or the one of the language model inside it."""
        names = ("text_encoder", "decoder", "generator", "text_config")
        inner = [name for name in names if isinstance(self.values.get(name), dict | Record)]
        found = self.get(inner[0]) if len(inner) == 1 else self
        return found if isinstance(found, Record) else Record(found, self.closed)


@dataclass(eq=False)
class Instance:
    """An object of an engine's class, initialised when it is first asked for something. ``opaque``: never."""

    ref: ClassRef
    args: list[Any] = field(default_factory=list, repr=False)
    kwargs: dict[str, Any] = field(default_factory=dict, repr=False)
    attrs: dict[str, Any] = field(default_factory=dict, repr=False)
    ready: bool = False
    opaque: bool = False


@dataclass(eq=False)
class Parameter:
    name: str
    shape: tuple[int, ...] | None = None  # None: several tensors of a checkpoint share it
    filled: bool = False


@dataclass(eq=False)
class Leaf:
    """An object that is not looked into: a layer, something of torch or transformers."""

    kind: str
    args: list[Any] = field(default_factory=list, repr=False)
    kwargs: dict[str, Any] = field(default_factory=dict, repr=False)
    attrs: dict[str, Any] = field(default_factory=dict, repr=False)
    parameters: dict[str, Parameter] = field(default_factory=dict, repr=False)

    def argument(self, position: int, *names: str) -> Any:
        given = [self.kwargs[name] for name in names if name in self.kwargs]
        return given[0] if given else self.args[position] if position < len(self.args) else UNKNOWN


@dataclass(eq=False)
class Function:
    ref: FunctionRef
    owner: ClassRef | None = None  # the class whose body it is in
    bound: Any = None  # self or cls


@dataclass(eq=False)
class Native:
    """Something done here instead of in the engine."""

    run: Callable[..., Any]


@dataclass(frozen=True)
class Class:
    ref: ClassRef


@dataclass(eq=False)
class Super:
    instance: Any
    after: ClassRef


@dataclass(eq=False)
class Tensor:
    """A tensor of a checkpoint; ``used`` once the engine's code touches its value."""

    name: str
    shape: tuple[int, ...]
    used: bool = False


@dataclass(eq=False)
class Parameters:
    """``named_parameters()`` of a module. ``unknown``: submodules that may have more."""

    known: dict[str, Parameter] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def holds(self, name: str) -> bool | None:
        if name in self.known:
            return True
        return None if any(name.startswith(f"{prefix}.") for prefix in self.unknown) else False


class Raised(Exception):
    """The engine's code raises this for certain."""

    def __init__(self, kind: str, message: str, where: str):
        super().__init__(f"{kind}: {message}")
        self.kind, self.message, self.where = kind, message, where


@dataclass(frozen=True)
class Warned:
    message: str
    where: str


@dataclass(frozen=True)
class Assigned:
    """A value that an attribute got; ``certain``: not under a condition that nobody knows."""

    name: str
    value: Any
    where: str
    certain: bool


@dataclass(eq=False)
class Frame:
    module: str
    names: dict[str, Any]
    owner: ClassRef | None = None
    bound: Any = None
    returned: list[Any] = field(default_factory=list)  # by branches that may have been taken
    doubts: int = 0  # how many of them there are so far: what follows may not happen
    branches: int = 0  # conditions that nobody knows, around the statement that runs now


def truth(value: Any) -> bool | None:
    """None: nobody knows."""
    if isinstance(value, Nothing | Tensor | Parameter | Parameters):
        return None
    if isinstance(value, Either):
        found = {truth(option) for option in value.options}
        return found.pop() if len(found) == 1 else None
    return bool(value)


def join(values: list[Any]) -> Any:
    """One value where all are the same, else any of them."""
    options: list[Any] = []
    for value in values:
        for option in value.options if isinstance(value, Either) else [value]:
            if not any(option is other or (plain(option) and plain(other) and option == other) for other in options):
                options.append(option)
    return options[0] if len(options) == 1 else Either(options)


def plain(value: Any) -> bool:
    """Whether a value is Python's own through and through, so that computing with it is exact."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(plain, value))
    if isinstance(value, Mapping):
        return all(plain(key) and plain(item) for key, item in value.items())
    return value is None or isinstance(value, bool | int | float | str | range)


def source_of(node: ast.AST, limit: int = 120) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
