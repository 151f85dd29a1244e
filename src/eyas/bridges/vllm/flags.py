"""What vLLM makes of --speculative-config: its own dataclass and its validators, run on the given keys."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from eyas.bridges.case import Case
from eyas.bridges.code.classes import Classes, ClassRef, FunctionRef, Member, ValueRef, dotted_name
from eyas.bridges.code.interpreter import Interpreter
from eyas.bridges.code.values import UNKNOWN, Function, Instance, Raised, Record
from eyas.bridges.report import Problem

_GIVEN = ("speculative_config", "sc")
_BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "ge": (operator.ge, "at least"), "gt": (operator.gt, "more than"),
    "le": (operator.le, "at most"), "lt": (operator.lt, "less than"),
}  # fmt: skip


def problems(case: Case) -> Iterator[Problem]:
    given = next((case.flags[key] for key in _GIVEN if key in case.flags), None)
    if given is None:
        return
    if not isinstance(given, dict):
        yield Problem(
            "fails",
            f"--speculative-config is {given!r}, not a JSON object",
            "dies at the start",
            "quote it for the shell",
        )
        return
    method = given.get("method")
    if method not in (None, "eagle3"):
        yield Problem(
            "fails", f"method is {method!r}", "the drafter is not run as an EAGLE-3 drafter", '"method": "eagle3"'
        )
    if method is None and "eagle3" not in str(given.get("model", case.checkpoint.path)).lower():
        yield Problem(
            "fails",
            'no method is given, and the name of the drafter does not hold "eagle3" (config/speculative.py)',
            "the drafter is run as a whole draft model: dies while it is loaded",
            '"method": "eagle3"',
        )
    if given.get("rejection_sample_method") == "synthetic" or any(str(key).startswith("synthetic_") for key in given):
        yield Problem(
            "silent",
            "synthetic acceptance is switched on",
            "text and speed mean nothing",
            "drop rejection_sample_method",
        )
    if given.get("parallel_drafting"):
        yield Problem(
            "fails", "parallel_drafting wants a drafter that was trained for it", "dies while it is loaded", "drop it"
        )
    yield from _dataclass(case, given)


def _dataclass(case: Case, given: dict[str, Any]) -> Iterator[Problem]:
    module = case.source.module("vllm.config.speculative")
    ref = case.classes.class_in(module, "SpeculativeConfig") if module else None
    if module is None or ref is None:
        return
    fields = [n for n in ref.node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    by_name = {n.target.id: n for n in fields}  # type: ignore[union-attr]
    defaults = {name: _default(n.value) for name, n in by_name.items()}
    for key in [key for key in given if key not in by_name]:
        yield Problem(
            "fails", f"{key} is no field of SpeculativeConfig ({case.source.label})", "dies at the start", f"drop {key}"
        )
    for key in [key for key in given if key in by_name and key != "method"]:
        if wanted := _unmet(case.classes, module, by_name[key], given[key]):
            text = f"{key} is {given[key]!r}, SpeculativeConfig takes {wanted} ({case.source.label})"
            yield Problem("fails", text, "dies at the start", "change --speculative-config")
            return
    values = defaults | {"model": str(case.checkpoint.path), "method": "eagle3"} | given
    interpreter = case.interpreter({})
    interpreter.believed.add(module)
    for name in ("__post_init__", "_verify_args"):
        config = Instance(ref, attrs=dict(values), ready=True, opaque=True)
        if not case.classes.find(ref, name):
            continue
        try:
            interpreter.method(config, name)
        except Raised as raised:
            text = f"{raised.where} raises {raised.kind}: {raised.message}"
            yield Problem("fails", text, "dies at the start", "change --speculative-config")
            return
    yield from _sharding(case, interpreter, ref, given)


def _sharding(case: Case, interpreter: Interpreter, ref: ClassRef, given: Mapping[str, Any]) -> Iterator[Problem]:
    """On how many GPUs the drafter may be spread, beside a target that is on as many as the flags say."""
    whole = next((case.flags[key] for key in ("tensor_parallel_size", "tp") if key in case.flags), 1)
    asked = given.get("draft_tensor_parallel_size")
    member = case.classes.find(ref, "_verify_and_get_draft_tp")
    if asked is None or not isinstance(member, Member) or not isinstance(member.node, ast.FunctionDef):
        return
    function = Function(FunctionRef(member.owner.module, member.node), member.owner)
    try:
        interpreter.call(function, Record({"tensor_parallel_size": whole}), asked, case.drafter_config())
    except Raised as raised:
        text = f"{raised.where} raises {raised.kind}: {raised.message}"
        fits = "1" if whole == 1 else f"1 or {whole}, as the target"
        yield Problem("fails", text, "dies at the start", f'"draft_tensor_parallel_size": {fits}')


def _unmet(classes: Classes, module: str, field: ast.AnnAssign, value: Any) -> str:
    """What pydantic wants of a field, where a value is not so: one of a Literal's words, or a number within bounds."""
    words = _words(classes, module, field.annotation)
    if words is not None and value not in words:
        return " or ".join(map(json.dumps, words))
    bounds = field.value.keywords if isinstance(field.value, ast.Call) else []
    number = isinstance(value, int | float) and not isinstance(value, bool)
    for bound in bounds if number else []:
        holds, words_of = _BOUNDS.get(str(bound.arg), (None, ""))
        if holds and isinstance(bound.value, ast.Constant) and not holds(value, bound.value.value):
            return f"{words_of} {bound.value.value!r}"
    return ""


def _words(classes: Classes, module: str, node: ast.expr, inside: bool = False) -> list[Any] | None:
    """The values that an annotation of Literals lists. None: it is not of Literals alone. ``inside`` one of them."""
    if isinstance(node, ast.Constant):
        return [node.value] if inside or node.value is None else None
    if isinstance(node, ast.Name):
        found = classes.meanings(module, node.id)
        meaning = found[0] if len(found) == 1 else None
        return _words(classes, meaning.module, meaning.node) if isinstance(meaning, ValueRef) else None
    parts: list[ast.expr] = []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        parts = [node.left, node.right]
    elif isinstance(node, ast.Subscript) and dotted_name(node.value).split(".")[-1] == "Literal":
        inside, parts = True, node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    listed = [_words(classes, module, part, inside) for part in parts]
    if not parts or any(words is None for words in listed):
        return None
    return [word for words in listed for word in words or ()]


def _default(node: ast.expr | None) -> Any:
    """The default of a field, also where it is ``Field(default=...)``."""
    if isinstance(node, ast.Call):
        node = next((k.value for k in node.keywords if k.arg == "default"), None)
    return node.value if isinstance(node, ast.Constant) else UNKNOWN
