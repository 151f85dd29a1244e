"""Wrappers: classes that hold the language model in an attribute, and whether passing calls on would be enough."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from eyas.bridges.code.classes import Classes, ClassRef, Member, Undecided
from eyas.bridges.code.interpreter import Interpreter
from eyas.bridges.code.values import UNKNOWN, Either, Instance, Nothing

_NAMES = re.compile(r"^(language_model|llm|lm|model|thinker|text_model|decoder)$")  # of attributes that hold the model
Kind = Literal["delegate", "cannot", "undecided"]


@dataclass(frozen=True)
class Wrapped:
    """``delegate``: the class in ``attribute`` has what the wrapper lacks. ``cannot``: nothing inside has it."""

    kind: Kind
    attribute: str = ""
    inner: str = ""
    reason: str = ""
    models: tuple[Instance, ...] = ()


def look_inside(interpreter: Interpreter, wrapper: Instance, names: Collection[str]) -> Wrapped:
    """Whether a model in the wrapper has ``names``, which are what the engine asks for.

    SGLang's interface lives in the inner model itself, so there a wrapper must not go around it.
    """
    classes = interpreter.classes
    whole = classes.source.name == "sglang"
    interpreter.build(wrapper, lenient=True)
    answer = Wrapped("cannot", reason="no model inside it has the interface either")
    for attribute, value in wrapper.attrs.items():
        options = [v for v in (value.options if isinstance(value, Either) else [value]) if v is not None]
        models = [v for v in options if isinstance(v, Instance)]
        likely = _NAMES.search(attribute)
        if likely and not models and any(isinstance(v, Nothing) for v in options):
            answer = Wrapped("undecided", attribute, "", f"what self.{attribute} holds is chosen at run time")
        answers = {_has_all(classes, model.ref, names) for model in models}
        inner = " or ".join(dict.fromkeys(model.ref.name for model in models))
        if answers == {True} and (len(models) == len(options) or UNKNOWN not in options):
            if not whole or _passed_whole(classes, wrapper.ref, attribute):
                return Wrapped("delegate", attribute, inner, models=tuple(models))
            answer = Wrapped(
                "cannot", attribute, inner, f"its forward goes around {inner}, through self.{attribute}.model"
            )
        elif answers & {True, None} and likely:
            answer = Wrapped("undecided", attribute, inner, f"self.{attribute} is {inner} by the config or at run time")
        elif answers and likely and answer.kind == "cannot" and not answer.attribute:
            answer = Wrapped("cannot", attribute, inner, f"{inner} inside it has no EAGLE-3 interface either")
    return answer


def _has_all(classes: Classes, ref: ClassRef, names: Collection[str]) -> bool | None:
    """None is for "perhaps"."""
    found = [classes.find(ref, name) for name in names]
    return False if None in found else None if any(isinstance(f, Undecided) for f in found) else True


def _passed_whole(classes: Classes, ref: ClassRef, attribute: str) -> bool:
    """Whether ``forward`` calls the inner model or passes it on, rather than only a part of it."""
    forward = classes.find(ref, "forward")
    if not isinstance(forward, Member):
        return True
    path = f"self.{attribute}"
    whole = part = False
    for node in ast.walk(forward.node):
        used = [node.func, *node.args, *(k.value for k in node.keywords)] if isinstance(node, ast.Call) else []
        texts = [ast.unparse(item) for item in used if isinstance(item, ast.Attribute)]
        whole |= any(text in (path, f"{path}.forward") for text in texts)
        part |= any(text.startswith(f"{path}.model") for text in texts)
    return whole or not part
