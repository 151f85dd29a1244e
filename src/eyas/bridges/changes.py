"""What is to be changed in an engine's source, and how a method that passes its call on is written."""

from __future__ import annotations

import ast
from copy import deepcopy
from dataclasses import dataclass

from eyas.core import EyasError


class CannotPatchError(EyasError):
    """Passing calls on would not make the target work, or nobody can say before it runs."""


@dataclass(frozen=True)
class Members:
    """Members for a class: ``text`` is their source, without indentation. ``line``: where the class begins."""

    module: str
    cls: str
    line: int
    text: str
    what: str


@dataclass(frozen=True)
class Argument:
    """An argument for every call of ``function``, as it is written there, that has none."""

    module: str
    function: str
    argument: str
    what: str


Change = Members | Argument


def passing_on(name: str, like: ast.stmt, attribute: str) -> str:
    """The source of a method with the signature of ``like`` that passes the call on to ``self.attribute``."""
    arguments = deepcopy(like.args) if isinstance(like, ast.FunctionDef) else None
    if arguments is None or arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs:
        raise CannotPatchError(f"{name} of the model inside has a signature that cannot be passed on simply")
    if not all(isinstance(default, ast.Constant) for default in arguments.defaults):
        raise CannotPatchError(f"{name} of the model inside has defaults that mean nothing elsewhere")
    for argument in arguments.args:
        argument.annotation = None  # its names may not be imported here
    given = ", ".join(argument.arg for argument in arguments.args[1:])
    return f"def {name}({ast.unparse(arguments)}):\n    return self.{attribute}.{name}({given})\n"
