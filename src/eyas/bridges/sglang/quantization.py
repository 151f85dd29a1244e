"""Whether SGLang can quantise the drafter as it quantises the target, which it does unless it is told otherwise."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from eyas.bridges.case import Case
from eyas.bridges.report import Problem

_OWN, _LOADER = "speculative_draft_model_quantization", "sglang.srt.model_loader.weight_utils"
_INHERITED = re.compile(rf"{_OWN}\s*=\s*\w+\.quantization\b")
_FIX = "--speculative-draft-model-quantization unquant leaves the drafter as it is"


def problems(case: Case) -> Iterator[Problem]:
    """A method whose parameters are read from a file that the drafter does not have."""
    given, method = case.flags.get(_OWN), _method(case)
    stated = any(case.checkpoint.config.get(key) for key in ("quantization_config", "compression_config"))
    if method is None or stated or method in _special(case):
        return
    wanted = _files(case, method)
    folder = case.checkpoint.folder
    if wanted and not any(file.name.endswith(tuple(wanted)) for file in folder.glob("*.json")):
        yield Problem(
            "fails",
            f"{'--quantization ' if given is None else f'--{_OWN} '.replace('_', '-')}{method} goes for the drafter; "
            f"{folder} has neither a quantization_config nor {' or '.join(wanted)}",
            "dies while the drafter is loaded, after the target's weights",
            _FIX,
        )


def _method(case: Case) -> str | None:
    """What the drafter is quantised with: its own flag, or in its place the target's."""
    method = case.flags.get(_OWN)
    if method is None:
        modules = case.source.containing([_OWN], ["srt/server_args", "srt/arg_groups/"])[_OWN]
        inherits = any(_INHERITED.search(case.source.text(module)) for module in modules)
        method = case.flags.get("quantization") if inherits else None
    return method.lower() if isinstance(method, str) and method != "unquant" else None


def _special(case: Case) -> set[str]:
    """Methods that the loader treats in a way of their own."""
    module = case.source.module(_LOADER)
    function = next(
        (
            node
            for node in (case.source.tree(module).body if module else [])
            if isinstance(node, ast.FunctionDef) and node.name == "get_quant_config"
        ),
        None,
    )
    compared = [node for node in ast.walk(function) if isinstance(node, ast.Compare)] if function else []
    sides = [side for node in compared if "quantization" in ast.unparse(node.left) for side in node.comparators]
    constants = [n.value for side in sides for n in ast.walk(side) if isinstance(n, ast.Constant)]
    return {name for name in constants if isinstance(name, str)}


def _files(case: Case, method: str) -> list[str]:
    """The files in which a method looks for its parameters; none where it needs none."""
    source, folder = case.source, "srt/layers/quantization/"
    module = source.module("sglang.srt.layers.quantization")
    name = _table(source.tree(module)).get(method) if module else None
    if name is None:
        return []
    word = f"class {name}("
    for place in source.containing([word], [folder])[word]:
        for node in ast.walk(source.tree(place)):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return [text for part in node.body for text in _returned(part, "get_config_filenames")]
    return []


def _table(tree: ast.Module) -> dict[str, str]:
    """Methods and the names of their classes; the first of a name is the one for CUDA."""
    found: dict[str, str] = {}
    for table in [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]:
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Name):
                found.setdefault(str(key.value), value.id)
    return found


def _returned(part: ast.stmt, name: str) -> list[str]:
    """The strings in what a method of this name returns."""
    if not isinstance(part, ast.FunctionDef) or part.name != name:
        return []
    values = [node.value for node in ast.walk(part) if isinstance(node, ast.Return) and node.value is not None]
    constants = [n.value for value in values for n in ast.walk(value) if isinstance(n, ast.Constant)]
    return [text for text in constants if isinstance(text, str)]
