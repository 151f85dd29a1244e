"""Which dtype SGLang gives the target and the drafter: its own rule, run on both configs.

Each is built in the dtype of its own config.json, and the target's states go into the drafter as they are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.bridges.case import Case
from eyas.bridges.code.classes import ClassRef
from eyas.bridges.code.values import Raised, Record
from eyas.bridges.report import Problem
from eyas.bridges.sglang.calls import facts
from eyas.bridges.target import INNER

_ISSUE = "https://github.com/sgl-project/sglang/pull/25894"
_KEYS = ("dtype", "torch_dtype")  # transformers takes the first, and calls both dtype
_DEPTH = 2  # a thinker's text model is the deepest that SGLang looks for
_LENT = "server_args.dtype = "  # a draft worker that gives its drafter the target's


@dataclass(frozen=True)
class _Rule:
    """The function that chooses a model's dtype from a config and --dtype, and the names of dtypes that it knows."""

    module: str
    function: ast.FunctionDef
    names: dict[str, Any]


def problems(case: Case, asked: Any, drafter: ClassRef) -> Iterator[Problem]:
    """``asked``: --dtype; ``drafter``: the class that is built of the drafter's config."""
    rule = _rule(case)
    if rule is None or _overruled(case):
        return
    at = f"{case.source.short(rule.module)}:{rule.function.lineno}"
    mine, theirs = _Model(case, rule, case.checkpoint.config, asked), _Model(case, rule, case.target.config, asked)
    files = case.checkpoint.folder / "config.json", case.target.folder / "config.json"
    try:
        own, target = mine.dtype(), theirs.dtype()
    except Raised as raised:
        yield Problem(
            "fails", f"{raised.where} raises {raised.kind}: {raised.message}", "dies at the start", "change --dtype"
        )
        return
    if own == target or own is None or target is None:
        return
    if theirs.inherited() == own:
        key, value = _stated(case.target.config)
        yield Problem(
            "note",
            f"{files[1]} has {key} {value} outside the language model's own config: the target is {own} if "
            f"transformers passes it on, like the drafter, and {target} if not ({at})",
            "if not, the drafter dies at its first forward: the states have another dtype than its weights",
            f"--dtype {own} makes sure, for both",
            _ISSUE,
        )
        return
    yield Problem(
        "fails",
        f"{theirs.said(files[1], 'the target')} {target}; {mine.said(files[0], 'the drafter')} {own} ({at})",
        f"dies at the drafter's first forward, at graph capture or in the first request: {_meet(case, drafter)} gets "
        "states of another dtype than its weights (mat1 and mat2 must have the same dtype)",
        f'start it with --dtype {target}, which goes for both, or write "torch_dtype": "{target}" into the drafter\'s '
        "config.json: its weights are cast as they are loaded",
        _ISSUE,
    )


@dataclass(frozen=True)
class _Model:
    """One of the two, by its config.json."""

    case: Case
    rule: _Rule
    raw: Mapping[str, Any]
    asked: Any

    def dtype(self) -> str | None:
        """float16, bfloat16 or float32; None where it cannot be known. Raises Raised for a --dtype that is none."""
        return self._chosen(self._text())

    def inherited(self) -> str | None:
        """What it would be if a config within the config had the outer one's dtype, where it has none."""
        text, outer = self._text(), _stated(self.raw)[1]
        inner = text.values.get("dtype") is None and outer is not None
        return self._chosen(Record({**text.values, "dtype": outer}, text.closed)) if inner else None

    def said(self, file: Path, what: str) -> str:
        """The key that decides; what it makes of the model is left to say."""
        path, value = _place(self.raw)
        held = f"{path} {value}" if value is not None else "no torch_dtype"
        return f"{file} has {held}, which makes {what}"

    def _text(self) -> Record:
        """The config of the language model inside, as SGLang finds it."""
        config = Record(_named(self.raw), frozenset(INNER))
        interpreter = self.case.interpreter(facts(self.case.classes))
        found = interpreter.call(interpreter.global_name(self.rule.module, "get_hf_text_config"), config)
        return found if isinstance(found, Record) else config

    def _chosen(self, config: Record) -> str | None:
        arguments = [argument.arg for argument in self.rule.function.args.args]
        *body, last = self.rule.function.body
        known = self.rule.names | dict(zip(arguments, (config, self.asked), strict=False))
        named = self.case.interpreter(facts(self.case.classes)).block(self.rule.module, body, known)
        value = named.get(last.value.id) if isinstance(last, ast.Return) and isinstance(last.value, ast.Name) else None
        return value if isinstance(value, str) else None


def _rule(case: Case) -> _Rule | None:
    """What ModelConfig calls for its ``dtype``; None in a version without."""
    module = case.source.module("sglang.srt.configs.model_config")
    tree = case.source.tree(module) if module else ast.Module([], [])
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self.dtype":
            name = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
            if module and name in functions:
                return _Rule(module, functions[name], _dtype_names(tree))
    return None


def _dtype_names(tree: ast.Module) -> dict[str, Any]:
    """torch and the module's tables of its dtypes, with the dtypes as plain names."""
    found: dict[str, Any] = {"torch": Record({name: name for name in ("float16", "bfloat16", "float32")})}
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        keys = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
        values = [ast.unparse(value) for value in node.value.values]
        if len(keys) == len(values) and values and all(value.startswith("torch.") for value in values):
            names = [value.removeprefix("torch.") for value in values]
            found[ast.unparse(node.targets[0])] = dict(zip(keys, names, strict=True))
    return found


def _named(raw: Mapping[str, Any], within: int = _DEPTH) -> dict[str, Any]:
    """A config.json with what transformers makes of its dtype, in configs within it too."""
    held = [key for key in INNER if within and isinstance(raw.get(key), dict)]
    return {**raw, **{key: _named(raw[key], within - 1) for key in held}, "dtype": _stated(raw)[1]}


def _stated(raw: Mapping[str, Any]) -> tuple[str, Any]:
    return next(((key, raw[key]) for key in _KEYS if raw.get(key) is not None), ("", None))


def _place(raw: Mapping[str, Any], within: int = _DEPTH) -> tuple[str, Any]:
    """The innermost dtype that is stated, and its key."""
    for key in INNER:
        if within and isinstance(raw.get(key), dict):
            path, value = _place(raw[key], within - 1)
            if value is not None:
                return f"{key}.{path}", value
    return _stated(raw)


def _overruled(case: Case) -> bool:
    """Whether SGLang may set --dtype itself, for both: for this target's architecture, or for every drafter."""
    named, source = case.target.architecture, case.source
    if source.containing([_LENT], ["srt/speculative/"])[_LENT]:
        return True
    modules = source.containing([named], ["srt/server_args", "srt/arg_groups/"])[named] if named else []
    return any(_sets_dtype(part) for module in modules for part in _about(source.tree(module), named))


def _about(tree: ast.Module, architecture: str) -> Iterator[ast.AST]:
    """What is done for an architecture only: under a condition, in a function registered for it, by a table."""

    def named(*nodes: ast.AST) -> bool:
        return any(isinstance(n, ast.Constant) and n.value == architecture for node in nodes for n in ast.walk(node))

    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.FunctionDef):
            tests = [node.test] if isinstance(node, ast.If) else node.decorator_list
            yield from node.body if named(*tests) else []
        elif isinstance(node, ast.Dict):
            yield from (value for key, value in zip(node.keys, node.values, strict=True) if key and named(key))


def _sets_dtype(part: ast.AST) -> bool:
    for node in ast.walk(part):
        for target in node.targets if isinstance(node, ast.Assign) else []:
            if isinstance(target, ast.Attribute) and target.attr == "dtype":
                return True
            if isinstance(target, ast.Subscript) and ast.unparse(target.slice) == "'dtype'":
                return True
        if isinstance(node, ast.Dict) and any(isinstance(k, ast.Constant) and k.value == "dtype" for k in node.keys):
            return True
    return False


def _meet(case: Case, drafter: ClassRef) -> str:
    """Where the target's states meet the drafter's weights."""
    short = case.source.short(drafter.module)
    for node in ast.walk(case.source.tree(drafter.module)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.fc":
            return f"fc ({short}:{node.lineno})"
    return f"{drafter.name} ({short}:{drafter.line})"
