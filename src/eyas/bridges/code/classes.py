"""Names and classes of an engine's source: what a name means in a module, what a class inherits, where a method is.

Nothing is run, so a name may have several meanings (a class split by platform, an alias under a condition). All of them
are kept, and whoever asks decides whether they agree.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePosixPath

from eyas.bridges.code.source import EngineSource, SourceError


@dataclass(frozen=True)
class ClassRef:
    module: str
    name: str
    line: int
    node: ast.ClassDef = field(compare=False, repr=False)  # a tree may be parsed again, the line stays


@dataclass(frozen=True)
class FunctionRef:
    module: str
    node: ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class ValueRef:
    """A name bound to an expression."""

    module: str
    node: ast.expr


@dataclass(frozen=True)
class ModuleRef:
    module: str


@dataclass(frozen=True)
class External:
    """Something outside the engine: torch, transformers, the standard library."""

    dotted: str


Meaning = ClassRef | FunctionRef | ValueRef | ModuleRef | External


@dataclass(frozen=True)
class Member:
    """A method or attribute of a class, and the class that has it."""

    owner: ClassRef
    node: ast.stmt

    @property
    def is_method(self) -> bool:
        return isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Undecided:
    """Only a running engine could tell; ``reason`` says why."""

    reason: str


@dataclass(frozen=True)
class _Binding:
    node: ast.stmt | ast.alias
    conditional: bool
    origin: str = ""  # the dotted module of a from-import


@lru_cache(maxsize=8)
def classes_of(source: EngineSource) -> Classes:
    """One index for all that is asked of a source."""
    return Classes(source)


class Classes:
    """The names of ``source``, module by module, as they are asked for."""

    def __init__(self, source: EngineSource):
        self.source = source
        self._bindings: dict[str, dict[str, list[_Binding]]] = {}
        self._generators: dict[ast.AST, bool] = {}
        self._members: dict[ClassRef, dict[str, list[ast.stmt]]] = {}
        self._ancestry: dict[ClassRef, tuple[list[ClassRef | External], list[str]]] = {}

    def forget(self, most: int = 5_000_000) -> None:
        """Drops what was parsed once it is of more than ``most`` bytes of source; it is parsed again if asked for."""
        if self.source.parsed > most:
            self._bindings.clear()
            self._members.clear()
            self._generators.clear()
            self._ancestry.clear()
            self.source.forget()

    # Names

    def meanings(self, module: str, dotted: str, before: ast.stmt | None = None, depth: int = 0) -> list[Meaning]:
        """What ``dotted`` can mean in ``module``; ``before`` is a class whose own name is not yet bound."""
        head, _, rest = dotted.partition(".")
        if depth > 25:
            return []
        found: list[Meaning] = []
        for binding in self._visible(module, head, before):
            for meaning in self._follow(module, binding, depth):
                found += self._attribute(meaning, rest, depth) if rest else [meaning]
        if not found and not rest:
            for star in self._visible(module, "*", None):
                found += self.imported(module, star.origin, head, depth)
        return list(dict.fromkeys(found))

    def class_in(self, module: str, name: str) -> ClassRef | None:
        """The class of this name where there is exactly one."""
        found = [m for m in self.meanings(module, name) if isinstance(m, ClassRef)]
        return found[0] if len(found) == 1 else None

    def _visible(self, module: str, name: str, before: ast.stmt | None) -> list[_Binding]:
        """The bindings of a name that may hold at the end of the module, or where ``before`` is defined."""
        bindings = self.bindings(module).get(name, [])
        nodes = [binding.node for binding in bindings]
        if before in nodes:
            bindings = bindings[: nodes.index(before)]
        last = max((i for i, binding in enumerate(bindings) if not binding.conditional), default=0)
        return bindings[last:]

    def _follow(self, module: str, binding: _Binding, depth: int) -> list[Meaning]:
        node = binding.node
        if isinstance(node, ast.ClassDef):
            return [ClassRef(module, node.name, node.lineno, node)]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return [FunctionRef(module, node)]
        if isinstance(node, ast.alias):
            if binding.origin:
                return self.imported(module, binding.origin, node.name, depth)
            return [self._module(node.name if node.asname else node.name.split(".")[0])]
        value = getattr(node, "value", None)
        if value is None:
            return []
        named = [dotted_name(option) for option in _options(value)]
        if all(named):  # an alias: "A = B", "A = B if condition else C"
            return [m for name in named for m in self.meanings(module, name, node, depth + 1)]
        return [ValueRef(module, value)]

    def imported(self, module: str, origin: str, name: str, depth: int = 0) -> list[Meaning]:
        """What ``from origin import name`` brings into ``module``."""
        package = _absolute(module, origin)
        path, submodule = self.source.module(package), self.source.module(f"{package}.{name}")
        if path and "/layers/" in path:  # a layer's name says all that a check needs: it is not looked into
            return [External(f"{package}.{name}")]
        found = self.meanings(path, name, None, depth + 1) if path and path != module else []
        if not found and submodule:
            return [ModuleRef(submodule)]
        outside = path is None and package.split(".")[0] != self.source.name
        return [External(f"{package}.{name}")] if outside else found

    def _module(self, dotted: str) -> Meaning:
        path = self.source.module(dotted)
        return ModuleRef(path) if path else External(dotted)

    def _attribute(self, meaning: Meaning, rest: str, depth: int) -> list[Meaning]:
        if isinstance(meaning, External):
            return [External(f"{meaning.dotted}.{rest}")]
        if isinstance(meaning, ModuleRef):
            folder = str(PurePosixPath(meaning.module).with_suffix("")).removesuffix("/__init__").replace("/", ".")
            found = self.meanings(meaning.module, rest, None, depth + 1)
            return found or ([self._module(f"{folder}.{rest}")] if self.source.module(f"{folder}.{rest}") else [])
        return []

    def bindings(self, module: str) -> dict[str, list[_Binding]]:
        if module not in self._bindings:
            table: dict[str, list[_Binding]] = {}
            for statement, conditional in _statements(self.source.tree(module).body):
                for name, binding in _bound(statement, conditional):
                    table.setdefault(name, []).append(binding)
            self._bindings[module] = table
        return self._bindings[module]

    # Classes

    def ancestry(self, ref: ClassRef) -> tuple[list[ClassRef | External], list[str]]:
        """The method resolution order of a class, and what of it could not be resolved."""
        if ref not in self._ancestry:
            self._ancestry[ref] = [ref], []  # a class that inherits from itself ends here
            self._ancestry[ref] = self._linearise(ref)
        return self._ancestry[ref]

    def _linearise(self, ref: ClassRef) -> tuple[list[ClassRef | External], list[str]]:
        lines: list[list[ClassRef | External]] = []
        direct: list[ClassRef | External] = []
        doubts: list[str] = []
        for base in ref.node.bases:
            name = dotted_name(base.value if isinstance(base, ast.Subscript) else base)
            try:
                found = self.meanings(ref.module, name, ref.node) if name else []
            except SourceError as error:
                found, name = [], f"{name} ({error})"
            classes = [m for m in found if isinstance(m, ClassRef | External)]
            if len(classes) != 1:
                kinds = "decided by a condition" if classes else "not to be found in the source"
                doubts.append(f"{ref.name}'s base {name or ast.unparse(base)} is {kinds}")
            for meaning in classes:
                line, more = self.ancestry(meaning) if isinstance(meaning, ClassRef) else ([meaning], [])
                lines.append(list(line))
                direct.append(meaning)
                doubts += more
        return [ref, *_merge([*lines, direct])], doubts

    def find(self, ref: ClassRef, name: str) -> Member | Undecided | None:
        """The method or attribute ``name`` of a class, through its ancestors. None: it certainly has none."""
        ancestors, doubts = self.ancestry(ref)
        for ancestor in ancestors:
            if isinstance(ancestor, ClassRef):
                for statement in self.members(ancestor).get(name, []):
                    return Member(ancestor, statement)
        if doubts:
            return Undecided(doubts[0])
        for ancestor in ancestors:
            if isinstance(ancestor, ClassRef) and "__getattr__" in self.members(ancestor):
                return Undecided(f"{ancestor.name} passes unknown names on with __getattr__")
        return None

    def members(self, ref: ClassRef) -> dict[str, list[ast.stmt]]:
        """What the body of a class binds itself, last definition first."""
        if ref not in self._members:
            table: dict[str, list[ast.stmt]] = {}
            for statement, _ in _statements(ref.node.body):
                for name, binding in _bound(statement, False):
                    if isinstance(binding.node, ast.stmt):
                        table.setdefault(name, []).insert(0, binding.node)
            self._members[ref] = table
        return self._members[ref]

    def is_generator(self, node: ast.AST) -> bool:
        """Whether a function yields."""
        if node not in self._generators:
            self._generators[node] = any(isinstance(inner, ast.Yield | ast.YieldFrom) for inner in ast.walk(node))
        return self._generators[node]

    def inherits(self, ref: ClassRef, other: ClassRef | External) -> bool | None:
        """None: some base of ``ref`` could not be resolved, so it may."""
        ancestors, doubts = self.ancestry(ref)
        return True if other in ancestors else None if doubts else False


def dotted_name(node: ast.AST) -> str:
    """``a.b.c`` as text, or "" for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted_name(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def _is_stub(node: ast.stmt) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(dotted_name(decorator).split(".")[-1] == "overload" for decorator in decorators)


def _options(node: ast.expr) -> list[ast.expr]:
    return [*_options(node.body), *_options(node.orelse)] if isinstance(node, ast.IfExp) else [node]


def _statements(body: list[ast.stmt], conditional: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """The statements of a body with those under conditions; what only type checkers see is left out."""
    for statement in body:
        if isinstance(statement, ast.If):
            if dotted_name(statement.test).split(".")[-1] == "TYPE_CHECKING":
                yield from _statements(statement.orelse, conditional)
                continue
            yield from _statements(statement.body, True)
            yield from _statements(statement.orelse, True)
        elif isinstance(statement, ast.Try):
            yield from _statements([*statement.body, *statement.orelse], True)
            for handler in statement.handlers:
                yield from _statements(handler.body, True)
        elif isinstance(statement, ast.With):
            yield from _statements(statement.body, conditional)
        else:
            yield statement, conditional


def _bound(statement: ast.stmt, conditional: bool) -> Iterator[tuple[str, _Binding]]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        if not _is_stub(statement):
            yield statement.name, _Binding(statement, conditional)
    elif isinstance(statement, ast.ImportFrom):
        origin = "." * statement.level + (statement.module or "")
        for alias in statement.names:
            yield alias.asname or alias.name, _Binding(alias, conditional, origin)
    elif isinstance(statement, ast.Import):
        for alias in statement.names:
            yield alias.asname or alias.name.split(".")[0], _Binding(alias, conditional)
    elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, _Binding(statement, conditional)


def _absolute(module: str, origin: str) -> str:
    """The dotted name of a from-import's module: one dot is the package that ``module`` lies in."""
    level = len(origin) - len(origin.lstrip("."))
    if not level:
        return origin
    parts = PurePosixPath(module).parent.parts
    return ".".join([*parts[: len(parts) - level + 1], *origin[level:].split(".")]).rstrip(".")


def _merge(lines: list[list[ClassRef | External]]) -> list[ClassRef | External]:
    """C3, or first come first served where the classes contradict each other."""
    merged: list[ClassRef | External] = []
    lines = [line for line in lines if line]
    while lines:
        heads = [line[0] for line in lines]
        free = [head for head in heads if not any(head in line[1:] for line in lines)]
        chosen = (free or heads)[0]
        merged.append(chosen)
        lines = [[item for item in line if item != chosen] for line in lines]
        lines = [line for line in lines if line]
    return merged
