"""What vLLM makes of --speculative-config: its own dataclass and its validators, run on the given keys."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from eyas.bridges.case import Case
from eyas.bridges.code.values import UNKNOWN, Instance, Raised
from eyas.bridges.report import Problem

_GIVEN = ("speculative_config", "sc")


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
    if given.get("rejection_sample_method") == "synthetic" or any(key.startswith("synthetic_") for key in given):
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
    defaults = {n.target.id: _default(n.value) for n in fields}  # type: ignore[union-attr]
    for key in [key for key in given if key not in defaults]:
        yield Problem(
            "fails", f"{key} is no field of SpeculativeConfig ({case.source.label})", "dies at the start", f"drop {key}"
        )
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


def _default(node: ast.expr | None) -> Any:
    """The default of a field, also where it is ``Field(default=...)``."""
    if isinstance(node, ast.Call):
        node = next((k.value for k in node.keywords if k.arg == "default"), None)
    return node.value if isinstance(node, ast.Constant) else UNKNOWN
