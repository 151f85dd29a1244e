"""What an engine's objects answer when nothing runs: attributes, calls, isinstance, and the parameters of a module."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from eyas.bridges.code.classes import (
    Classes,
    ClassRef,
    External,
    FunctionRef,
    Meaning,
    Member,
    ModuleRef,
    Undecided,
    ValueRef,
    dotted_name,
)
from eyas.bridges.code.source import SourceError
from eyas.bridges.code.values import (
    ABSENT,
    UNKNOWN,
    Class,
    Either,
    Frame,
    Function,
    Instance,
    Leaf,
    Native,
    Nothing,
    Parameter,
    Parameters,
    Raised,
    Record,
    Super,
    Tensor,
    join,
    plain,
    truth,
)  # fmt: skip

_BUILTINS: dict[str, Callable[..., Any]] = {
    "len": len, "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict, "sorted": sorted,
    "max": max, "min": min, "sum": sum, "any": any, "all": all, "range": range, "int": int, "float": float, "str": str,
    "bool": bool, "abs": abs, "round": round, "repr": repr, "enumerate": lambda *a: list(enumerate(*a)),
    "zip": lambda *a: list(zip(*a, strict=False)), "reversed": lambda a: list(reversed(a)), "print": lambda *a: None,
}  # fmt: skip
_TYPES: dict[str, type] = {"list": list, "tuple": tuple, "dict": dict, "str": str, "int": int, "bool": bool, "set": set}
_EMPTY = ("torch.nn.Module", "typing.Protocol", "typing.Generic", "abc.ABC", "builtins.object")  # bring nothing of ours
_MOST = 100_000  # items of a range: a config may say anything
_ITSELF = ("to", "eval", "cuda", "cpu", "half", "float", "requires_grad_", "train")  # methods of a module


class Objects:
    """``facts``: what attributes and functions of these names give wherever their owner is not known.

    ``overrides``: functions and classes that are done here instead of in the engine, by name; methods as "Class.name",
    which get their object first.
    """

    def __init__(self, classes: Classes, facts: Mapping[str, Any]):
        self.classes, self.facts = classes, dict(facts)
        self.believed: set[str] = set()  # modules outside the models whose exceptions count
        self.overrides: dict[str, Callable[..., Any]] = {}
        self.calls: dict[str, list[tuple[list[Any], dict[str, Any]]]] = {}  # of functions outside the engine
        self.filled: list[tuple[Parameter, Tensor]] = []  # parameters and what is loaded into them
        self._globals: dict[tuple[str, str], Any] = {}

    # For the interpreter to provide

    def evaluate(self, node: ast.expr, frame: Frame) -> Any:
        raise NotImplementedError

    def invoke(self, function: Function, args: list[Any], kwargs: dict[str, Any], lenient: bool = False) -> Any:
        """``lenient``: a statement that raises is passed over."""
        raise NotImplementedError

    def follows(self, module: str) -> bool:
        """Whether the code of a module counts: models, and what was asked for."""
        return "/models/" in module or module in self.believed

    # Attributes

    def attribute(self, value: Any, name: str) -> Any:
        """``value.name``, or ABSENT."""
        if isinstance(value, Either):
            return join([self.attribute(option, name) for option in value.options])
        if isinstance(value, Record):
            return Native(lambda *args, **kwargs: value.text_config()) if name == "get_text_config" else value.get(name)
        if isinstance(value, Instance):
            return self._of_instance(value, name)
        if isinstance(value, Class):
            member = self.classes.find(value.ref, name)
            return self._of_class(member, value) if member else value.ref.name if name == "__name__" else ABSENT
        if isinstance(value, Super):
            return self._of_super(value, name)
        if isinstance(value, ModuleRef):
            return self.global_name(value.module, name)
        if isinstance(value, External):
            return External(f"{value.dotted}.{name}")
        if isinstance(value, Tensor) and name == "shape":
            return value.shape
        if isinstance(value, Leaf) and name in value.attrs:
            return value.attrs[name]
        if isinstance(value, Parameters):
            return Native(lambda: list(value.known.items()) if name == "items" else value)
        if isinstance(value, Nothing | Leaf | Tensor | Function | Native | Parameter):
            return self.facts.get(name, UNKNOWN)
        return Native(getattr(value, name)) if callable(getattr(value, name, None)) else ABSENT

    def _of_instance(self, value: Instance, name: str) -> Any:
        if name in value.attrs:
            return value.attrs[name]
        if name in _ITSELF:
            return Native(lambda *args, **kwargs: value)
        if name == "named_parameters":
            return Native(lambda *args, **kwargs: self.parameters(value))
        member = self.classes.find(value.ref, name)
        if not (isinstance(member, Member) and member.is_method) and not value.ready:
            self.build(value, lenient=True)
        if name in value.attrs:
            return value.attrs[name]
        if isinstance(member, Member):
            return self._of_class(member, value)
        if name == "__class__":
            return Class(value.ref)
        if value.opaque or name in self.facts or member or self._inherits_outside(value.ref):
            return self.facts.get(name, UNKNOWN)
        return ABSENT

    def _inherits_outside(self, ref: ClassRef) -> bool:
        ancestors, doubts = self.classes.ancestry(ref)
        return bool(doubts) or any(isinstance(a, External) and a.dotted not in _EMPTY for a in ancestors)

    def _of_class(self, member: Member | Undecided, value: Instance | Class) -> Any:
        if isinstance(member, Undecided):
            return UNKNOWN
        if not member.is_method:
            node = getattr(member.node, "value", None)
            found = UNKNOWN if node is None else self.evaluate(node, Frame(member.owner.module, {}, member.owner))
            return UNKNOWN if found in ({}, []) else found  # filled at run time
        assert isinstance(member.node, ast.FunctionDef | ast.AsyncFunctionDef)
        decorators = {dotted_name(d).split(".")[-1] for d in member.node.decorator_list}
        bound = None if "staticmethod" in decorators else Class(value.ref) if "classmethod" in decorators else value
        function = Function(FunctionRef(member.owner.module, member.node), member.owner, bound)
        if decorators & {"property", "cached_property"} and isinstance(value, Instance):
            return self.invoke(function, [], {})
        return function

    def _of_super(self, value: Super, name: str) -> Any:
        ancestors, _ = self.classes.ancestry(value.instance.ref)
        later = ancestors[ancestors.index(value.after) + 1 :] if value.after in ancestors else []
        for ancestor in later:
            if isinstance(ancestor, ClassRef) and name in self.classes.members(ancestor):
                return self._of_class(Member(ancestor, self.classes.members(ancestor)[name][0]), value.instance)
        return UNKNOWN

    def get(self, value: Any, name: str, *default: Any) -> Any:
        """``getattr``: a key that a config lacks has the default, if its class has no other."""
        found = self.attribute(value, name)
        if found is ABSENT or (found is UNKNOWN and isinstance(value, Record)):
            return default[0] if default else UNKNOWN
        return found

    def has(self, value: Any, name: str) -> Any:
        """``hasattr``."""
        found = self.attribute(value, name)
        return False if found is ABSENT else UNKNOWN if found is UNKNOWN else True

    def is_a(self, value: Any, kinds: Any) -> bool | None:
        """``isinstance``, of one class or a tuple of them."""
        if isinstance(kinds, tuple | list):
            answers = [self.is_a(value, kind) for kind in kinds]
            return True if True in answers else None if None in answers else False
        if isinstance(value, Either):
            found = {self.is_a(option, kinds) for option in value.options}
            return found.pop() if len(found) == 1 else None
        own = plain(value) or isinstance(value, list | tuple | dict)
        if isinstance(kinds, External) and kinds.dotted.startswith("builtins."):
            wanted = _TYPES.get(kinds.dotted.removeprefix("builtins."))
            return isinstance(value, wanted) if wanted and own else None if isinstance(value, Nothing) else False
        if isinstance(value, Instance) and isinstance(kinds, Class):
            return self._conforms(value, kinds.ref)
        if isinstance(value, Record) and isinstance(kinds, Class):  # a config class has one model_type
            named, kind = value.values.get("model_type"), self.attribute(kinds, "model_type")
            return named == kind if isinstance(named, str) and isinstance(kind, str) else None
        return False if own else None

    def _conforms(self, value: Instance, kind: ClassRef) -> bool | None:
        """By inheritance, or by having all members where the class is a protocol that is checked at run time."""
        inherits = self.classes.inherits(value.ref, kind)
        if inherits or not any(ast.unparse(d).endswith("runtime_checkable") for d in kind.node.decorator_list):
            return inherits
        answers = [self.classes.find(value.ref, name) for name in self.protocol(kind)]
        return False if None in answers else None if any(isinstance(a, Undecided) for a in answers) else True

    def protocol(self, kind: ClassRef) -> list[str]:
        """The names that a class needs to conform to a protocol."""
        ancestors, _ = self.classes.ancestry(kind)
        names = [name for a in ancestors if isinstance(a, ClassRef) for name in self.classes.members(a)]
        return [name for name in dict.fromkeys(names) if not name.startswith("__")]

    # Names

    def global_name(self, module: str, name: str) -> Any:
        key = (module, name)
        if key not in self._globals:
            self._globals[key] = UNKNOWN  # for a global that needs itself
            try:
                found = [self.meaning(m) for m in self.classes.meanings(module, name)]
            except (SourceError, Raised):
                found = []
            found = [UNKNOWN if value is None or value in ({}, []) else value for value in found]  # filled at run time
            builtin = External(f"builtins.{name}") if name in _BUILTINS or name in _TYPES else UNKNOWN
            self._globals[key] = join(found) if found else builtin
        return self._globals[key]

    def meaning(self, meaning: Meaning) -> Any:
        if isinstance(meaning, ClassRef):
            return Class(meaning)
        if isinstance(meaning, FunctionRef):
            return Function(meaning)
        if isinstance(meaning, ValueRef):
            return self.evaluate(meaning.node, Frame(meaning.module, {}))
        return meaning

    # Calls

    def apply(self, function: Any, args: list[Any], kwargs: dict[str, Any], name: str, where: str = "") -> Any:
        """``function(*args, **kwargs)``; ``name`` is what the code calls it."""
        for parameter in [argument for argument in args if isinstance(argument, Parameter)]:
            parameter.filled = True  # passed to its weight loader
            self.filled += [(parameter, argument) for argument in args if isinstance(argument, Tensor)]
        if name in self.overrides:
            return self.overrides[name](*args, **kwargs)
        if isinstance(function, Function) and function.owner and f"{function.owner.name}.{name}" in self.overrides:
            return self.overrides[f"{function.owner.name}.{name}"](function.bound, *args, **kwargs)
        if name in self.facts and not isinstance(function, Class):
            return self.facts[name]
        if isinstance(function, Either):
            return join([self.apply(option, args, kwargs, name, where) for option in function.options])
        if isinstance(function, Function):
            return self.invoke(function, args, kwargs)
        if isinstance(function, Class):
            return self._construct(function.ref, args, kwargs)
        if isinstance(function, Native):
            return _exact(function.run, args, kwargs, where)
        if isinstance(function, External) and function.dotted.startswith("builtins."):
            return self._builtin(function.dotted.removeprefix("builtins."), args, kwargs, where)
        self.calls.setdefault(name, []).append((args, kwargs))
        if isinstance(function, External):
            return self._outside(function.dotted, args, kwargs)
        return UNKNOWN

    def _construct(self, ref: ClassRef, args: list[Any], kwargs: dict[str, Any]) -> Any:
        followed = self.follows(ref.module)
        return Instance(ref, args, kwargs, ready=not followed, opaque=not followed)

    def _outside(self, dotted: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        kind = dotted.split(".")[-1]
        if kind in ("ModuleList", "Sequential"):
            return (
                args[0]
                if kind == "ModuleList" and args and isinstance(args[0], list)
                else UNKNOWN
                if kind == "ModuleList"
                else args
            )
        if dotted.startswith("re.") and plain(args):
            return _exact(getattr(re, kind), args, kwargs, "")
        return Leaf(kind, args, kwargs) if kind[:1].isupper() else UNKNOWN

    def _builtin(self, name: str, args: list[Any], kwargs: dict[str, Any], where: str) -> Any:
        if name == "dict" and args and isinstance(args[0], Parameters):
            return args[0]
        if name == "bool" and args:
            known = truth(args[0])
            return UNKNOWN if known is None else known
        if name in ("any", "all") and args and isinstance(args[0], list):
            answers = [truth(item) for item in args[0]]
            decisive = name == "any"
            return decisive if decisive in answers else UNKNOWN if None in answers else not decisive
        shallow = name in ("len", "list", "tuple", "dict", "enumerate", "zip", "reversed", "print")
        if name not in _BUILTINS or not (shallow or plain(args)) or any(isinstance(a, Nothing | Either) for a in args):
            return UNKNOWN
        if name not in ("len", "max", "min") and any(isinstance(a, range) and a[_MOST:] for a in args):
            return UNKNOWN
        return _exact(_BUILTINS[name], args, kwargs, where)

    def build(self, instance: Instance, lenient: bool = False) -> Instance:
        """Runs ``__init__`` now. Raises Raised where it certainly raises, unless ``lenient``."""
        if instance.ready:
            return instance
        instance.ready = True
        found = self.classes.find(instance.ref, "__init__")
        function = self._of_class(found, instance) if isinstance(found, Member) else None
        if isinstance(function, Function):
            self.invoke(function, instance.args, instance.kwargs, lenient)
        else:  # a dataclass, or something of torch
            fields = [
                n for n in instance.ref.node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            ]
            names = [n.target.id for n in fields if isinstance(n.target, ast.Name)]
            frame = Frame(instance.ref.module, {}, instance.ref)
            given = {
                n: self._default(f.value, frame) for n, f in zip(names, fields, strict=True) if f.value is not None
            }
            instance.attrs |= given | dict(zip(names, instance.args, strict=False)) | instance.kwargs
        return instance

    def _default(self, node: ast.expr, frame: Frame) -> Any:
        """The default of a dataclass's field, also where ``field(...)`` makes it."""
        if isinstance(node, ast.Call) and ast.unparse(node.func).lower().endswith("field"):
            given = {k.arg: self.evaluate(k.value, frame) for k in node.keywords}
            made = self.apply(given["default_factory"], [], {}, "") if "default_factory" in given else UNKNOWN
            return given.get("default", made)
        return self.evaluate(node, frame)

    # Modules

    def parameters(self, root: Any) -> Parameters:
        """The parameters of a module, as ``named_parameters()`` names them."""
        found = Parameters()
        self._walk(root, "", found, set())
        return found

    def _walk(self, value: Any, path: str, found: Parameters, seen: set[int]) -> None:
        if id(value) in seen and not isinstance(value, Nothing):
            return  # tied
        seen.add(id(value))
        if isinstance(value, Instance):
            self.build(value)
            for name, item in list(value.attrs.items()):
                self._walk(item, f"{path}{name}.", found, seen)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, Instance | Leaf):
                    self._walk(item, f"{path}{index}.", found, seen)
        elif isinstance(value, Leaf):
            for name, shape in _tensors(value).items():
                full = f"{path}{name}".removesuffix(".")
                found.known[full] = value.parameters.setdefault(name, Parameter(full, shape))
        elif isinstance(value, Nothing | Either):
            found.unknown.append(path.removesuffix("."))


def _tensors(leaf: Leaf) -> dict[str, tuple[int, ...] | None]:
    """Names and shapes of a layer's tensors in a checkpoint; None: a shape that several tensors share."""
    if leaf.kind == "Parameter":
        return {"": None}
    if leaf.kind.endswith(("Norm", "NormGated")):
        return {"weight": _sizes(leaf.argument(0, "hidden_size", "dim"))}
    if re.search("Embedding$|LMHead$", leaf.kind):
        sizes = leaf.argument(0, "num_embeddings"), leaf.argument(1, "embedding_dim")
        return {"weight": _sizes(*sizes)} if "Rotary" not in leaf.kind else {}
    if "Linear" in leaf.kind:
        inner, outer = leaf.argument(0, "input_size", "in_features"), leaf.argument(1, "output_size", "out_features")
        several = re.search("QKV|Merged", leaf.kind)
        weight = {"weight": None if several else _sizes(outer, inner)}
        return weight if truth(leaf.argument(9, "bias")) is False else {**weight, "bias": None}
    return {}


def _sizes(*sizes: Any) -> tuple[int, ...] | None:
    return tuple(sizes) if all(type(size) is int for size in sizes) else None


def _exact(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], where: str) -> Any:
    """Python's own answer, or its own exception as the engine would meet it."""
    try:
        return function(*args, **kwargs)
    except (KeyError, IndexError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise Raised(type(error).__name__, str(error), where) from None
    except (TypeError, re.error, MemoryError, OverflowError):
        return UNKNOWN
