"""Runs a few functions of an engine on what is known: configs and tensor names; everything else is unknown.

This is how a check follows an engine of any version instead of knowing each one: the code that reads layer ids, builds
the drafter and loads its tensors is evaluated on its syntax tree. Nothing is imported, no file, network or process is
touched, and the number of steps is limited. A condition that cannot be known leads into both branches, and what they
assign is possible, not certain.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from eyas.bridges.code.classes import Classes, External, Member, ModuleRef, dotted_name
from eyas.bridges.code.objects import Objects
from eyas.bridges.code.source import SourceError
from eyas.bridges.code.values import (
    ABSENT,
    UNKNOWN,
    Assigned,
    Class,
    Either,
    Frame,
    Function,
    Instance,
    Leaf,
    Nothing,
    Parameters,
    Raised,
    Record,
    Super,
    Tensor,
    Warned,
    join,
    plain,
    source_of,
    truth,
)  # fmt: skip

_STEPS, _DEPTH, _HELPERS = 100_000, 40, 3  # helpers of helpers of helpers say nothing about a drafter
_BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv, ast.Mod: operator.mod, ast.BitOr: operator.or_, ast.BitAnd: operator.and_,
}  # fmt: skip
_COMPARE: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_LOUD = ("warning", "warning_once", "error")
_FILLING = ("append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "clear")


class _OutOfSteps(Exception):
    """Longer than anything a check needs to follow."""


class _Return(Exception):
    def __init__(self, value: Any):
        self.value = value


class _Break(Exception):
    pass


class _Continue(Exception):
    pass


class Interpreter(Objects):
    def __init__(self, classes: Classes, facts: Mapping[str, Any], environment: Mapping[str, str]):
        super().__init__(classes, facts)
        self.environment = environment
        self.warnings: list[Warned] = []
        self.assigned: list[Assigned] = []  # to attributes, in order
        self.looked_up: list[Assigned] = []  # what was asked, by a known key, of something that a running engine fills
        self._steps = self._depth = self._helpers = self._doubt = 0

    # For those who check

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a value. Raises Raised where the engine's code certainly raises."""
        self._steps = 0
        try:
            return self.apply(function, list(args), kwargs, "")
        except (_OutOfSteps, SourceError, RecursionError):
            return UNKNOWN

    def method(self, owner: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.attribute(owner, name), *args, **kwargs)

    def build(self, instance: Instance, lenient: bool = False) -> Instance:
        if self._depth:
            return super().build(instance, lenient)
        self._steps = 0
        try:
            return super().build(instance, lenient)
        except (_OutOfSteps, RecursionError):
            return instance

    def block(self, module: str, body: list[ast.stmt], names: Mapping[str, Any]) -> dict[str, Any]:
        """Runs statements out of the middle of a function, given some of its names; gives all of them."""
        self._steps = 0
        frame = Frame(module, dict(names))
        try:
            self._run(body, frame)
        except (_Return, _Break, _Continue, _OutOfSteps, SourceError, RecursionError):
            pass
        except Raised:
            if not frame.doubts:
                raise
        finally:
            self._doubt = 0
        return frame.names

    def invoke(self, function: Function, args: list[Any], kwargs: dict[str, Any], lenient: bool = False) -> Any:
        node, followed = function.ref.node, self.follows(function.ref.module)
        too_deep = self._depth >= _DEPTH or (not followed and self._helpers >= _HELPERS)
        frame = Frame(function.ref.module, {}, function.owner, function.bound)
        frame.names = self._arguments(function, args, kwargs, frame)
        if too_deep or isinstance(node, ast.AsyncFunctionDef) or self.classes.is_generator(node):
            self._forget(node.body, frame)
            return UNKNOWN
        self._depth += 1
        self._helpers += not followed
        try:
            self._run(node.body, frame, lenient)
            result = None
        except _Return as returned:
            result = returned.value
        except Raised:
            if frame.doubts or not followed:
                self._forget(node.body, frame)
                return UNKNOWN  # helpers raise where they miss a running engine
            raise
        except (_OutOfSteps, SourceError, RecursionError):
            self._forget(node.body, frame)
            raise
        finally:
            self._depth -= 1
            self._helpers -= not followed
            self._doubt -= frame.doubts
        return join([*frame.returned, result]) if frame.returned else result

    def _arguments(self, function: Function, args: list[Any], kwargs: dict[str, Any], frame: Frame) -> dict[str, Any]:
        spec = function.ref.node.args
        places = [a.arg for a in [*spec.posonlyargs, *spec.args]]
        given = [*([] if function.bound is None else [function.bound]), *args]
        defaults = dict(zip(places[::-1], spec.defaults[::-1], strict=False))
        defaults |= {a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None}
        names = {name: self.evaluate(node, frame) for name, node in defaults.items()}
        names |= dict(zip(places, given, strict=False))
        known = {*places, *(a.arg for a in spec.kwonlyargs)}
        names |= {name: value for name, value in kwargs.items() if name in known}
        if spec.vararg:
            names[spec.vararg.arg] = tuple(given[len(places) :])
        if spec.kwarg:
            names[spec.kwarg.arg] = {name: value for name, value in kwargs.items() if name not in known}
        return dict.fromkeys(known, UNKNOWN) | names

    # Statements

    def _run(self, body: list[ast.stmt], frame: Frame, lenient: bool = False) -> None:
        for statement in body:
            self._step()
            handler = getattr(self, f"_do_{type(statement).__name__.lower()}", None)
            try:
                if handler:
                    handler(statement, frame)
            except Raised:
                if not lenient:
                    raise
                self._forget([statement], frame)

    def _step(self) -> None:
        self._steps += 1
        if self._steps > _STEPS:
            raise _OutOfSteps

    def _do_expr(self, node: ast.Expr, frame: Frame) -> None:
        self.evaluate(node.value, frame)

    def _do_assign(self, node: ast.Assign, frame: Frame) -> None:
        value = self.evaluate(node.value, frame)
        for target in node.targets:
            self._assign(target, value, frame)

    def _do_annassign(self, node: ast.AnnAssign, frame: Frame) -> None:
        if node.value is not None:
            self._assign(node.target, self.evaluate(node.value, frame), frame)

    def _do_augassign(self, node: ast.AugAssign, frame: Frame) -> None:
        now = ast.parse(ast.unparse(node.target), mode="eval").body
        whole = ast.BinOp(ast.copy_location(now, node), node.op, node.value)
        self._assign(node.target, self.evaluate(ast.copy_location(whole, node), frame), frame)

    def _do_functiondef(self, node: ast.FunctionDef, frame: Frame) -> None:
        frame.names[node.name] = UNKNOWN
        self._forget([node], frame)

    def _do_import(self, node: ast.Import, frame: Frame) -> None:
        for alias in node.names:
            dotted = alias.name if alias.asname else alias.name.split(".")[0]
            path = self.classes.source.module(dotted)
            frame.names[alias.asname or dotted] = ModuleRef(path) if path else External(dotted)

    def _do_importfrom(self, node: ast.ImportFrom, frame: Frame) -> None:
        for alias in node.names:
            origin = "." * node.level + (node.module or "")
            found = [self.meaning(m) for m in self.classes.imported(frame.module, origin, alias.name)]
            frame.names[alias.asname or alias.name] = join(found) if found else UNKNOWN

    def _do_return(self, node: ast.Return, frame: Frame) -> None:
        raise _Return(None if node.value is None else self.evaluate(node.value, frame))

    def _do_break(self, node: ast.Break, frame: Frame) -> None:
        raise _Break

    def _do_continue(self, node: ast.Continue, frame: Frame) -> None:
        raise _Continue

    def _do_raise(self, node: ast.Raise, frame: Frame) -> None:
        kind = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        said = [self._say(a, frame) for a in node.exc.args] if isinstance(node.exc, ast.Call) else []
        raise Raised(ast.unparse(kind) if kind else "Exception", " ".join(said), self._where(node, frame))

    def _do_assert(self, node: ast.Assert, frame: Frame) -> None:
        if truth(self.evaluate(node.test, frame)) is False:
            message = self._say(node.msg, frame) if node.msg else source_of(node.test)
            raise Raised("AssertionError", message, self._where(node, frame))

    def _do_with(self, node: ast.With, frame: Frame) -> None:
        for item in node.items:
            self.evaluate(item.context_expr, frame)
            if item.optional_vars is not None:
                self._assign(item.optional_vars, UNKNOWN, frame)
        self._run(node.body, frame)

    def _do_if(self, node: ast.If, frame: Frame) -> None:
        known = truth(self.evaluate(node.test, frame))
        if known is None:
            self._perhaps([node.body, node.orelse], frame)
        else:
            self._run(node.body if known else node.orelse, frame)

    def _do_for(self, node: ast.For, frame: Frame) -> None:
        items = _items(self.evaluate(node.iter, frame))
        if items is None:
            self._assign(node.target, UNKNOWN, frame)
            self._perhaps([node.body, []], frame)
            self._forget(node.body, frame, assigned=False)
            return
        for item in items:
            self._assign(node.target, item, frame)
            doubts = frame.doubts
            try:
                self._run(node.body, frame)
            except _Continue:
                continue
            except _Break:
                return
            finally:
                if not frame.returned:  # a perhaps skipped rest of this round says nothing about the next
                    self._doubt -= frame.doubts - doubts
                    frame.doubts = doubts
        self._run(node.orelse, frame)

    def _do_while(self, node: ast.While, frame: Frame) -> None:
        self._perhaps([node.body, []], frame)
        self._forget(node.body, frame, assigned=False)

    def _do_try(self, node: ast.Try, frame: Frame) -> None:
        try:
            self._run([*node.body, *node.orelse], frame)
        except Raised as raised:
            for handler in node.handlers:
                caught = ast.unparse(handler.type) if handler.type else "Exception"
                if raised.kind in caught or re.search(r"\b(Base)?Exception\b", caught):
                    self._run(handler.body, frame)
                    break
            else:
                raise
        finally:
            self._run(node.finalbody, frame)

    def _perhaps(self, branches: list[list[ast.stmt]], frame: Frame) -> None:
        """Runs every branch, since nobody knows which is taken; ends the function only where all of them do."""
        ends: list[Exception] = []
        self._doubt += 1
        frame.branches += 1
        try:
            for branch in branches:
                try:
                    self._run(branch, frame)
                except (Raised, _Continue, _Break, _Return) as end:
                    ends.append(end)
        finally:
            self._doubt -= 1
            frame.branches -= 1
        values = [end.value for end in ends if isinstance(end, _Return)]
        if len(ends) < len(branches):
            frame.returned += values
            if any(not isinstance(end, Raised) for end in ends):
                frame.doubts += 1
                self._doubt += 1
        elif values:
            raise _Return(join(values))
        else:
            raise next((end for end in ends if not isinstance(end, Raised)), ends[0])

    # What is not followed

    def _forget(self, body: list[ast.stmt], frame: Frame, assigned: bool = True, seen: tuple[Any, ...] = ()) -> None:
        """Nobody followed these statements, so what they may fill or assign is unknown: of names that are in reach, and
        by the methods that they call too. ``assigned``: or only what they may fill.
        """
        own = {name for statement in body for name in _own_names(statement)}
        for node in (node for statement in body for node in ast.walk(statement)):
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and assigned:
                self._unlearn(node, frame, own, filled=False)
            elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                self._unlearn(node.value, frame, own)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in _FILLING:
                    self._unlearn(node.func.value, frame, own)
                owner = self._reached(node.func.value, frame, own)
                member = self.classes.find(owner.ref, node.func.attr) if isinstance(owner, Instance) else None
                method = member.node if isinstance(member, Member) else None
                if isinstance(method, ast.FunctionDef) and method.args.args and method not in seen:
                    names = {method.args.args[0].arg: owner}
                    self._forget(method.body, Frame(frame.module, names), assigned, (*seen, method))

    def _unlearn(self, place: ast.expr, frame: Frame, own: set[str], filled: bool = True) -> None:
        """``filled``: a list or dictionary at this place may hold something else, rather than the place itself."""
        if isinstance(place, ast.Name):
            if place.id not in own and isinstance(frame.names.get(place.id), list | dict | set):
                frame.names[place.id] = UNKNOWN
        elif isinstance(place, ast.Attribute):
            owner = self._reached(place.value, frame, own)
            now = owner.attrs.get(place.attr, ABSENT) if isinstance(owner, Instance) else ABSENT
            if isinstance(owner, Instance) and (not filled or isinstance(now, list | dict | set)):
                owner.attrs[place.attr] = UNKNOWN if filled or now is ABSENT else join([now, UNKNOWN])

    def _reached(self, place: ast.expr, frame: Frame, own: set[str]) -> Any:
        """The object at ``a.b.c``, as far as it is there already."""
        if isinstance(place, ast.Name):
            return None if place.id in own else frame.names.get(place.id)
        owner = self._reached(place.value, frame, own) if isinstance(place, ast.Attribute) else None
        return owner.attrs.get(place.attr) if isinstance(owner, Instance) and isinstance(place, ast.Attribute) else None

    # Assignment

    def _assign(self, target: ast.expr, value: Any, frame: Frame) -> None:
        if isinstance(target, ast.Name):
            frame.names[target.id] = _possible(frame.names, target.id, value, frame.branches > 0)
        elif isinstance(target, ast.Attribute):
            self.assigned.append(Assigned(target.attr, value, self._where(target, frame), not self._doubt))
            self.set(self.evaluate(target.value, frame), target.attr, value)
        elif isinstance(target, ast.Subscript):
            container, key = self.evaluate(target.value, frame), self.evaluate(target.slice, frame)
            fits = isinstance(container, dict) or (isinstance(container, list) and key in range(len(container)))
            if _keys([key]) and fits:
                held = isinstance(container, list) or key in container
                container[key] = join([container[key], value]) if self._doubt and held else value
            elif not plain(key):
                self._unlearn(target.value, frame, set())
        elif isinstance(target, ast.Tuple | ast.List):
            items = _items(value)
            exact = items is not None and len(items) == len(target.elts)
            for index, part in enumerate(target.elts):
                self._assign(part, items[index] if items and exact else UNKNOWN, frame)
        elif isinstance(target, ast.Starred):
            self._assign(target.value, UNKNOWN, frame)

    def set(self, owner: Any, name: str, value: Any) -> None:
        if isinstance(owner, Either):
            for option in owner.options:
                self.set(option, name, value)
        elif isinstance(owner, Instance):
            self.attribute(owner, name)  # initialises it
            owner.attrs[name] = _possible(owner.attrs, name, value, self._doubt > 0)
        elif isinstance(owner, Record | Leaf):
            names = owner.values if isinstance(owner, Record) else owner.attrs
            names[name] = _possible(names, name, value, self._doubt > 0)
            if isinstance(owner, Leaf) and name in owner.parameters:
                owner.parameters[name].filled = True

    # Expressions

    def evaluate(self, node: ast.expr, frame: Frame) -> Any:
        self._step()
        handler = getattr(self, f"_get_{type(node).__name__.lower()}", None)
        return handler(node, frame) if handler else UNKNOWN

    def _get_constant(self, node: ast.Constant, frame: Frame) -> Any:
        return node.value

    def _get_name(self, node: ast.Name, frame: Frame) -> Any:
        value = frame.names.get(node.id, ABSENT)
        if isinstance(value, Tensor):
            value.used = True
        return self.global_name(frame.module, node.id) if value is ABSENT else value

    def _get_attribute(self, node: ast.Attribute, frame: Frame) -> Any:
        owner = self.evaluate(node.value, frame)
        value = self.attribute(owner, node.attr)
        if value is ABSENT:
            kind = owner.ref.name if isinstance(owner, Instance | Class) else type(owner).__name__
            kind = "config" if isinstance(owner, Record) else kind
            raise Raised("AttributeError", f"'{kind}' object has no attribute '{node.attr}'", self._where(node, frame))
        return value

    def _get_list(self, node: ast.List | ast.Tuple | ast.Set, frame: Frame) -> Any:
        return self._elements(node.elts, frame)

    def _get_tuple(self, node: ast.Tuple, frame: Frame) -> Any:
        items = self._elements(node.elts, frame)
        return tuple(items) if isinstance(items, list) else items

    def _get_set(self, node: ast.Set, frame: Frame) -> Any:
        items = self._elements(node.elts, frame)
        return set(items) if _keys(items) else UNKNOWN

    def _elements(self, nodes: list[ast.expr], frame: Frame) -> Any:
        found: list[Any] = []
        for node in nodes:
            if not isinstance(node, ast.Starred):
                found.append(self.evaluate(node, frame))
                continue
            items = _items(self.evaluate(node.value, frame))
            if items is None:
                return UNKNOWN
            found += items
        return found

    def _get_dict(self, node: ast.Dict, frame: Frame) -> Any:
        made: dict[Any, Any] = {}
        for key_node, value_node in zip(node.keys, node.values, strict=True):
            key, value = key_node and self.evaluate(key_node, frame), self.evaluate(value_node, frame)
            if key_node is None and isinstance(value, dict):
                made |= value
            elif key_node is not None and _keys([key]):
                made[key] = value
            else:
                return UNKNOWN
        return made

    def _get_joinedstr(self, node: ast.JoinedStr, frame: Frame) -> Any:
        parts = [self.evaluate(p.value if isinstance(p, ast.FormattedValue) else p, frame) for p in node.values]
        return "".join(map(str, parts)) if plain(parts) else UNKNOWN

    def _get_binop(self, node: ast.BinOp, frame: Frame) -> Any:
        left, right = self.evaluate(node.left, frame), self.evaluate(node.right, frame)
        operation = _BINARY.get(type(node.op))
        sound = all(plain(side) or isinstance(side, list | tuple | dict) for side in (left, right))
        if operation is None or not sound or _too_long(node.op, left, right):
            return UNKNOWN
        try:
            return operation(left, right)
        except (TypeError, ValueError, ArithmeticError, LookupError, MemoryError) as error:
            if left is None or right is None:
                raise Raised("TypeError", str(error), self._where(node, frame)) from None
            return UNKNOWN

    def _get_unaryop(self, node: ast.UnaryOp, frame: Frame) -> Any:
        value = self.evaluate(node.operand, frame)
        if isinstance(node.op, ast.Not):
            known = truth(value)
            return UNKNOWN if known is None else not known
        return -value if isinstance(node.op, ast.USub) and isinstance(value, int | float) else UNKNOWN

    def _get_boolop(self, node: ast.BoolOp, frame: Frame) -> Any:
        decisive = isinstance(node.op, ast.Or)
        unsure: list[Any] = []
        value: Any = UNKNOWN
        for part in node.values:
            try:
                value = self.evaluate(part, frame)
            except Raised:
                if not unsure:
                    raise
                value = UNKNOWN
            known = truth(value)
            if known is decisive:
                return value if not unsure or isinstance(value, bool) else join([*unsure, value])
            if known is None:
                unsure.append(value)
        return join([*unsure, value]) if unsure else value

    def _get_compare(self, node: ast.Compare, frame: Frame) -> Any:
        left, answers = self.evaluate(node.left, frame), []
        for kind, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.evaluate(right_node, frame)
            answers.append(_compare(kind, left, right, self._where(node, frame)))
            left = right
        return False if False in answers else UNKNOWN if None in answers else True

    def _get_ifexp(self, node: ast.IfExp, frame: Frame) -> Any:
        known = truth(self.evaluate(node.test, frame))
        if known is None:
            return join([self.evaluate(node.body, frame), self.evaluate(node.orelse, frame)])
        return self.evaluate(node.body if known else node.orelse, frame)

    def _get_namedexpr(self, node: ast.NamedExpr, frame: Frame) -> Any:
        value = self.evaluate(node.value, frame)
        self._assign(node.target, value, frame)
        return value

    def _get_subscript(self, node: ast.Subscript, frame: Frame) -> Any:
        owner = self.evaluate(node.value, frame)
        if isinstance(node.slice, ast.Slice):
            bounds = node.slice.lower, node.slice.upper, node.slice.step
            parts: list[Any] = [None if bound is None else self.evaluate(bound, frame) for bound in bounds]
            numbers = all(part is None or isinstance(part, int) for part in parts) and parts[2] != 0
            return owner[slice(*parts)] if isinstance(owner, list | tuple | str) and numbers else UNKNOWN
        key = self.evaluate(node.slice, frame)
        if isinstance(owner, Parameters) and key in owner.known:
            owner.known[key].filled = True
            return owner.known[key]
        if owner is None:
            raise Raised("TypeError", "'NoneType' object is not subscriptable", self._where(node, frame))
        if not isinstance(owner, dict | list | tuple | str) or not plain(key):
            if owner is UNKNOWN and plain(key):
                name = ast.unparse(node.value)
                self.looked_up.append(Assigned(name, key, self._where(node, frame), not self._doubt))
            return UNKNOWN
        try:
            return owner[key]
        except (KeyError, IndexError, TypeError) as error:
            raise Raised(type(error).__name__, str(error), self._where(node, frame)) from None

    def _get_listcomp(self, node: ast.ListComp | ast.GeneratorExp, frame: Frame) -> Any:
        return self._comprehend(node.elt, node.generators, frame)

    _get_generatorexp = _get_listcomp

    def _get_setcomp(self, node: ast.SetComp, frame: Frame) -> Any:
        found = self._comprehend(node.elt, node.generators, frame)
        return set(found) if _keys(found) else UNKNOWN

    def _get_dictcomp(self, node: ast.DictComp, frame: Frame) -> Any:
        pairs = self._comprehend(ast.Tuple([node.key, node.value], ast.Load()), node.generators, frame)
        return dict(pairs) if isinstance(pairs, list) and _keys([key for key, _ in pairs]) else UNKNOWN

    def _comprehend(self, element: ast.expr, generators: list[ast.comprehension], frame: Frame) -> Any:
        inner = Frame(frame.module, dict(frame.names), frame.owner, frame.bound)
        found: list[Any] = []
        return found if self._generate(element, generators, inner, found) else UNKNOWN

    def _generate(self, element: ast.expr, generators: list[ast.comprehension], frame: Frame, found: list[Any]) -> bool:
        if not generators:
            found.append(self.evaluate(element, frame))
            return True
        items = _items(self.evaluate(generators[0].iter, frame))
        for item in items or []:
            self._assign(generators[0].target, item, frame)
            kept = [truth(self.evaluate(test, frame)) for test in generators[0].ifs]
            if None in kept or (all(kept) and not self._generate(element, generators[1:], frame, found)):
                return False
        return items is not None

    def _get_call(self, node: ast.Call, frame: Frame) -> Any:
        setting = self._setting(node, frame)
        if setting is not ABSENT:
            return setting
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in _LOUD and "log" in dotted_name(node.func).lower() and node.args:
            if not self._doubt:
                self.warnings.append(Warned(self._say(node.args[0], frame), self._where(node, frame)))
            return None
        if name == "super" and frame.owner and isinstance(frame.bound, Instance | Class):
            after = self.evaluate(node.args[0], frame) if node.args else None
            return Super(frame.bound, after.ref if isinstance(after, Class) else frame.owner)
        function, args = self.evaluate(node.func, frame), self._elements(node.args, frame)
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value, frame)
            kwargs |= {keyword.arg: value} if keyword.arg else value if isinstance(value, dict) else {}
        if not isinstance(args, list):
            return UNKNOWN
        special = self._language(name, args) if isinstance(node.func, ast.Name) or name == "cast" else ABSENT
        if special is not ABSENT:
            return special
        if isinstance(function, Nothing):
            for given in (*node.args, *(keyword.value for keyword in node.keywords)):
                self._unlearn(given, frame, set())  # whoever it is may fill what it is given
        return self.apply(function, args, kwargs, name, self._where(node, frame))

    def _language(self, name: str, args: list[Any]) -> Any:
        """Functions of the language that look into objects. ABSENT: it is none of them."""
        named = len(args) >= 2 and isinstance(args[1], str)
        if name == "getattr" and named:
            return self.get(*args)
        if name == "hasattr" and named:
            return self.has(*args)
        if name == "isinstance" and len(args) == 2:
            known = self.is_a(*args)
            return UNKNOWN if known is None else known
        if name == "setattr" and named and len(args) == 3:
            self.assigned.append(Assigned(args[1], args[2], "", not self._doubt))
            return self.set(args[0], args[1], args[2])
        if name == "cast" and len(args) == 2:
            return args[1]
        if name == "type" and len(args) == 1:
            return Class(args[0].ref) if isinstance(args[0], Instance) else UNKNOWN
        return ABSENT

    def _setting(self, node: ast.Call, frame: Frame) -> Any:
        """``envs.NAME.get()`` and ``os.getenv("NAME")``, from our environment or by default. ABSENT: neither."""
        function = node.func
        if node.args and dotted_name(function) in ("os.getenv", "os.environ.get"):
            name, *default = (self.evaluate(argument, frame) for argument in node.args)
            return self.environment.get(name, *default) if isinstance(name, str) else UNKNOWN
        declared = function.value if isinstance(function, ast.Attribute) and function.attr == "get" else None
        if (
            node.args
            or not isinstance(declared, ast.Attribute)
            or not re.fullmatch("[A-Z]+(_[A-Z0-9]+)+", declared.attr)
        ):
            return ABSENT
        if declared.attr in self.environment:
            return _parsed(self.environment[declared.attr])
        field = self.evaluate(declared, frame)
        return field.args[0] if isinstance(field, Leaf | Instance) and field.args else UNKNOWN

    # Words

    def _say(self, node: ast.expr, frame: Frame) -> str:
        """A message, with what is not known as the code spells it."""
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.FormattedValue) else p for p in node.values]
            return "".join(self._say(part, frame) for part in parts)
        value = self.evaluate(node, frame)
        return str(value) if plain(value) else f"<{source_of(node)}>"

    def _where(self, node: ast.AST, frame: Frame) -> str:
        return f"{self.classes.source.short(frame.module)}:{getattr(node, 'lineno', 0)}"


def _own_names(statement: ast.stmt) -> set[str]:
    """The names that a function of its own has for itself; none of other statements."""
    if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    nodes = list(ast.walk(statement))
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    outer = {name for n in nodes if isinstance(n, ast.Nonlocal) for name in n.names}
    return ({n.arg for n in nodes if isinstance(n, ast.arg)} | stored) - outer


def _possible(names: Mapping[str, Any], name: str, value: Any, doubtful: bool) -> Any:
    """What a name means once a value is assigned to it: perhaps still what it was."""
    return join([names[name], value]) if doubtful and name in names else value


def _keys(values: Any) -> bool:
    """Whether these are known, and could be keys of a dictionary."""
    try:
        set(values)
    except TypeError:
        return False
    return plain(values)


def _too_long(kind: ast.operator, left: Any, right: Any) -> bool:
    """Whether ``left * right`` repeats something more often than a check could follow."""
    sides = ((left, right), (right, left)) if isinstance(kind, ast.Mult) else ()
    return any(isinstance(a, list | tuple | str) and type(b) is int and len(a) * b > _STEPS for a, b in sides)


def _items(value: Any) -> list[Any] | None:
    if isinstance(value, range) and value[_STEPS:]:
        return None  # longer than what a check follows
    if isinstance(value, Parameters) and not value.unknown:
        return list(value.known.items())
    ours = list | tuple | set | frozenset | dict | range | str | type({}.items()) | type({}.keys()) | type({}.values())
    return list(value) if isinstance(value, ours) else None


def _compare(kind: ast.cmpop, left: Any, right: Any, where: str) -> bool | None:
    if isinstance(kind, ast.IsNot | ast.NotIn | ast.NotEq):
        opposite = {ast.IsNot: ast.Is, ast.NotIn: ast.In, ast.NotEq: ast.Eq}[type(kind)]
        positive = _compare(opposite(), left, right, where)
        return None if positive is None else not positive
    if isinstance(kind, ast.Is):
        return _identical(left, right)
    if isinstance(kind, ast.In):
        try:
            return _contains(right, left)
        except TypeError as error:
            raise Raised("TypeError", str(error), where) from None
    if isinstance(kind, ast.Eq) and (None in (left, right) or (left is right and isinstance(left, Record))):
        return _identical(left, right)
    if not plain(left) or not plain(right):
        return None
    try:
        return bool(_COMPARE[type(kind)](left, right))
    except TypeError:
        raise Raised("TypeError", f"{left!r} and {right!r} cannot be compared", where) from None


def _identical(left: Any, right: Any) -> bool | None:
    if isinstance(left, Either):
        found = {_identical(option, right) for option in left.options}
        return found.pop() if len(found) == 1 else None
    if left is UNKNOWN or right is UNKNOWN or isinstance(right, Either):
        return None
    return left == right if (plain(left) and plain(right)) or isinstance(left, Class) else left is right


def _contains(container: Any, item: Any) -> bool | None:
    if isinstance(container, Parameters) and isinstance(item, str):
        return container.holds(item)
    if isinstance(container, dict | set | frozenset | str | range):
        return item in container if plain(item) and (item is not None or not isinstance(container, str)) else None
    if isinstance(container, list | tuple):
        if plain(item) and item in [other for other in container if plain(other)]:
            return True
        return False if plain(item) and plain(container) else None
    return None


def _parsed(text: str) -> Any:
    """An environment variable as the engine's own parser would take it."""
    if text.lower() in ("true", "false", "yes", "no"):
        return text.lower() in ("true", "yes")
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text
