"""Where an engine calls its models: the contract, read off the callers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from eyas.bridges.code.source import EngineSource

Tests = tuple[tuple[ast.expr, bool], ...]  # conditions, and whether they hold


@dataclass(frozen=True)
class Site:
    """One use of an attribute: ``receiver.name`` or ``receiver.name(...)``, with what surrounds it."""

    module: str
    line: int
    receiver: str
    name: str
    called: bool
    node: ast.AST = field(compare=False, repr=False)
    tests: Tests = field(compare=False, repr=False)
    around: tuple[ast.stmt, ...] = field(compare=False, repr=False)  # the statements around it, outermost first

    @property
    def function(self) -> str:
        """The function around it, a constructor with its class: "ModelRunner.__init__"."""
        scopes = [s for s in self.around if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
        if not scopes or isinstance(scopes[-1], ast.ClassDef):
            return ""
        made = scopes[-1].name == "__init__" and len(scopes) > 1
        return f"{scopes[-2].name}.__init__" if made else scopes[-1].name

    @property
    def asked_first(self) -> bool:
        """Whether a condition around it asks for the attribute, so that a model may lack it."""
        asked = f"'{self.name}')"
        return any(holds and "hasattr(" in (text := ast.unparse(test)) and asked in text for test, holds in self.tests)

    def under(self, word: str) -> bool | None:
        """Whether a condition that mentions ``word`` leads here (True) or away from here (False)."""
        answers = [holds and not _negated(test) for test, holds in self.tests if word in ast.unparse(test)]
        return answers[-1] if answers else None

    def at(self, source: EngineSource) -> str:
        return f"{source.short(self.module)}:{self.line}"


@lru_cache(maxsize=64)
def sites(source: EngineSource, module: str, names: tuple[str, ...] = ()) -> tuple[Site, ...]:
    """Every use of an attribute of these names in a module, or of any name."""
    return tuple(_walk(module, source.tree(module), set(names) or None, (), ()))


def _walk(
    module: str,
    node: ast.AST,
    names: set[str] | None,
    tests: Tests,
    around: tuple[ast.stmt, ...],
) -> Iterator[Site]:
    if isinstance(node, ast.ExceptHandler):
        return  # not where things go well
    if isinstance(node, ast.stmt):
        around = (*around, node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        tests = ()
    attribute = node.func if isinstance(node, ast.Call) else node
    if isinstance(attribute, ast.Attribute) and (names is None or attribute.attr in names):
        called = attribute is not node
        if called or isinstance(attribute.ctx, ast.Load):
            receiver = ast.unparse(attribute.value)
            yield Site(module, attribute.lineno, receiver, attribute.attr, called, node, tests, around)
    for children, inner in _branches(node, tests):
        for child in children:
            taken = isinstance(node, ast.Call) and child is node.func and isinstance(child, ast.Attribute)
            yield from _walk(module, child.value if taken else child, names, inner, around)


def _branches(node: ast.AST, tests: Tests) -> list[tuple[list[Any], Tests]]:
    """The parts of a node, and the conditions under which each is reached."""
    if isinstance(node, ast.If | ast.IfExp):
        parts = [p if isinstance(p, list) else [p] for p in (node.body, node.orelse)]
        return [([node.test], tests), (parts[0], (*tests, (node.test, True))), (parts[1], (*tests, (node.test, False)))]
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        return [([v], (*tests, *((w, True) for w in node.values[:i]))) for i, v in enumerate(node.values)]
    return [(list(ast.iter_child_nodes(node)), tests)]


def _negated(test: ast.expr) -> bool:
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


@lru_cache(maxsize=8)
def reachable(source: EngineSource, start: str, modules: frozenset[str]) -> set[str]:
    """Names that a function or class of these modules, called ``start``, may come to use, by mention."""
    mentions: dict[str, set[str]] = {}
    for module in modules:
        for node in ast.walk(source.tree(module)):
            if isinstance(node, ast.ClassDef):
                made = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
                mentions.setdefault(node.name, set()).update(f"{node.name}.__init__" for _ in made)
                for method in made:
                    mentions.setdefault(f"{node.name}.__init__", set()).update(_mentioned(method))
            elif isinstance(node, ast.FunctionDef) and node.name != "__init__":
                mentions.setdefault(node.name, set()).update(_mentioned(node))
    found, ahead = set[str](), [start]
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead += mentions.get(name, ())
    return found


def _mentioned(node: ast.AST) -> set[str]:
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return names | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def imported_modules(source: EngineSource, module: str, under: str) -> list[str]:
    """Modules of one folder that ``module`` imports, anywhere in it."""
    found = []
    for node in ast.walk(source.tree(module)):
        dotted = node.module if isinstance(node, ast.ImportFrom) and not node.level else None
        path = source.module(dotted) if dotted else None
        if path and path.startswith(under):
            found.append(path)
    return sorted(set(found))
