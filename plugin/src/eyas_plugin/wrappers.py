"""What a wrapper lacks is added to its class, and passed on to the model inside it that has it.

Whether there is such a model shows when the wrapper is made, which is before weights are loaded: it is looked for then,
and its absence ends the engine with the reason.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_DEPTH = 3  # a wrapper of a wrapper of a model
_LANGUAGE = re.compile(r"(^|\.)(language_model|llm|lm|model|thinker|text_model|decoder)$")
_ADDED = "_eyas_added"
_lock = threading.RLock()

Examined = Callable[[Any, tuple[str, ...]], None]


class CannotServeEagle3(RuntimeError):
    """Neither the class nor a model inside it has what the engine asks of a target."""


@dataclass(frozen=True)
class Interface:
    """``methods``: what the engine's callers call. ``extra``: what comes along if the inner model has it.

    ``flags``: what they only read. ``whole``: the interface lives in the inner model itself, so that the wrapper's
    forward must not go around it. ``rehearse`` tries the interface of the wrapper and of the model inside it, and
    raises what is wrong.
    """

    engine: str
    methods: tuple[str, ...]
    extra: tuple[str, ...] = ()
    flags: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False
    rehearse: Callable[[Any, Any], None] = lambda model, inner: None


def amend(cls: type, interface: Interface, examined: Examined) -> tuple[str, ...]:
    """Adds what ``cls`` lacks, once, and returns the names of all that was ever added to it.

    ``examined`` is called with every model of the class as soon as it is made, and with the methods it lacked.
    """
    with _lock:
        if _ADDED in vars(cls):
            return vars(cls)[_ADDED]
        methods = tuple(name for name in interface.methods if not hasattr(cls, name))
        extra = [name for name in interface.extra if methods and not hasattr(cls, name)]
        flags = [name for name in interface.flags if not hasattr(cls, name)]
        for name in (*methods, *extra):
            setattr(cls, name, _passing_on(name, methods))
        for name in flags:
            setattr(cls, name, interface.flags[name])
        if methods:
            cls.__init__ = _examining(cls, methods, examined)  # type: ignore[misc]
        added = (*methods, *extra, *flags)
        setattr(cls, _ADDED, added)
        return added


def _passing_on(name: str, methods: tuple[str, ...]) -> Callable[..., Any]:
    def passed_on(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(find_inner(self, methods)[1], name)(*args, **kwargs)

    passed_on.__name__ = passed_on.__qualname__ = name
    passed_on.__doc__ = "Added by eyas-plugin: passed on to the language model inside."
    return passed_on


def _examining(cls: type, methods: tuple[str, ...], examined: Examined) -> Callable[..., None]:
    construct = cls.__init__  # type: ignore[misc]

    @functools.wraps(construct)  # engines look at its signature
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        if type(self) is cls:  # a subclass is not yet whole here, and was not asked for
            examined(self, methods)

    return __init__


def examine(model: Any, methods: tuple[str, ...], interface: Interface) -> str:
    """The way to the inner model, "language_model: LlamaForCausalLM". Raises CannotServeEagle3."""
    cls = type(model).__name__
    try:
        path, inner = find_inner(model, methods)
        holder = model
        for attribute in path.split(".") if interface.whole else ():
            if not _passed_whole(type(holder), attribute):
                raise CannotServeEagle3(f"its forward goes around self.{attribute}, through self.{attribute}.model")
            holder = getattr(holder, attribute)
        interface.rehearse(model, inner)
    except Exception as error:  # of whatever kind: it would come later, and cost the loading of the weights
        reason = str(error) or type(error).__name__
        raise CannotServeEagle3(
            f"eyas-plugin: {cls} cannot be a target of EAGLE-3 in this {interface.engine}: {reason}. Take another "
            f"target or a newer {interface.engine}; without EYAS_PLUGIN and speculation it can be served."
        ) from error
    return f"{path}: {type(inner).__name__}"


def find_inner(model: Any, methods: tuple[str, ...]) -> tuple[str, Any]:
    """The nearest module inside ``model`` with all of ``methods``, and where it is. Raises CannotServeEagle3."""
    level = [("", model)]
    seen: list[str] = []
    for _ in range(_DEPTH):
        level = list(_children(level))
        found = [(path, child) for path, child in level if all(callable(getattr(child, n, None)) for n in methods)]
        if len(found) > 1:
            found = [(path, child) for path, child in found if _LANGUAGE.search(path)] or found
        if len(found) > 1:
            raise CannotServeEagle3(f"several models inside it have the interface: {', '.join(p for p, _ in found)}")
        if found:
            return found[0]
        seen += [f"{path} ({type(child).__name__})" for path, child in level if _LANGUAGE.search(path)]
    where = ", ".join(seen) or "there is no language model inside it"
    raise CannotServeEagle3(f"nothing inside it has {' and '.join(methods)}: {where}")


def _children(level: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    known = set[int]()
    for path, parent in level:
        for name, child in parent.named_children():
            if id(child) not in known:
                known.add(id(child))
                yield f"{path}.{name}".lstrip("."), child


def _passed_whole(cls: type, attribute: str) -> bool:
    """Whether ``forward`` calls the inner model or passes it on, rather than only a part of it."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))  # type: ignore[attr-defined]
    except (AttributeError, OSError, TypeError, SyntaxError):
        return True  # no Python source, so no forward of the kind that goes around
    path = f"self.{attribute}"
    whole = part = False
    for node in ast.walk(tree):
        used = [node.func, *node.args, *(k.value for k in node.keywords)] if isinstance(node, ast.Call) else []
        texts = [ast.unparse(item) for item in used if isinstance(item, ast.Attribute)]
        whole |= any(text in (path, f"{path}.forward") for text in texts)
        part |= any(text.startswith(f"{path}.model") for text in texts)
    return whole or not part
