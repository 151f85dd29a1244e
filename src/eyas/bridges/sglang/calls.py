"""What SGLang asks of a target and of a drafter, read off its model runner, its graph runner and its draft worker."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eyas.bridges.code.callers import Site, imported_modules, reachable, sites
from eyas.bridges.code.classes import Classes, ClassRef
from eyas.bridges.code.interpreter import Interpreter
from eyas.bridges.code.source import EngineSource, SourceError
from eyas.bridges.code.values import UNKNOWN, Class, Either, Instance, Record

MODELS = "srt/models/"
FACTS = {"is_last_rank": True, "is_first_rank": True, "is_draft_worker": False, "is_in_ci": False}
IDS = "eagle_aux_hidden_state_layer_ids"
_STAGES = ("at kernel warm-up", "at graph capture", "behind graph capture", "when the drafter", "once")  # in order
_OF_TORCH = {"modules", "named_modules", "named_parameters", "parameters", "children", "to", "eval"}
_TARGET = re.compile(r"(^|\.)target\w*\.model_runner\.model$|^target_model$")
_MODEL = re.compile(r"target\w*\.model_runner\.model\.|draft\w*\.model\.|\b(target|draft)_model\.")
_DRAFTER = re.compile(r"(^|\.)draft\w*\.model$|^draft_model$")


@dataclass(frozen=True)
class Call:
    """One thing that the engine does with a model. ``stage``: when."""

    side: str  # "target" or "drafter"
    site: Site
    stage: str

    @property
    def name(self) -> str:
        return self.site.name


def registry(source: EngineSource, only: str = "EntryClass") -> dict[str, str]:
    """Architectures and their modules: ``EntryClass`` of every module in models/ (models/registry.py).

    ``only`` is a word that modules without are not looked at.
    """
    folder = f"{source.name}/{MODELS}"
    found: dict[str, str] = {}
    for module in source.containing([only], [MODELS])[only]:
        if "/" not in module.removeprefix(folder):  # pkgutil.iter_modules looks at the folder itself
            found |= dict.fromkeys(_entries(source, module), module)
    return found


def _entries(source: EngineSource, module: str) -> list[str]:
    """The names in ``EntryClass``, which is near the end of a long module: what is before it need not be parsed."""
    try:
        start = re.search(r"^EntryClass\b", source.text(module), re.MULTILINE)
        body = ast.parse(source.text(module)[start.start() :]).body if start else []
    except (SourceError, SyntaxError, ValueError):
        return []  # SGLang itself skips a module that it cannot import
    values = [n.value for n in body if isinstance(n, ast.Assign | ast.AnnAssign) and "EntryClass" in ast.unparse(n)]
    return [name for value in values for name in _names(value)]


def _names(node: ast.expr | None) -> list[str]:
    if isinstance(node, ast.List | ast.Tuple):
        return [name for item in node.elts for name in _names(item)]
    if isinstance(node, ast.BinOp):
        return [*_names(node.left), *_names(node.right)]
    return [node.id] if isinstance(node, ast.Name) else []


def find_architecture(classes: Classes, name: str) -> list[ClassRef]:
    """The registered class of an architecture. Raises SourceError where a module that may have it cannot be parsed."""
    if not name:
        return []
    source = classes.source
    if module := registry(source, name).get(name):
        return [m for m in classes.meanings(module, name) if isinstance(m, ClassRef)]
    for module in source.containing([name], [MODELS])[name]:
        source.tree(module)
    return []


def facts(classes: Classes) -> dict[str, Any]:
    """What is known wherever it is asked: this is the last of the pipeline ranks, and the algorithm is EAGLE-3."""
    ref = classes.class_in(f"{classes.source.name}/srt/speculative/spec_info.py", "SpeculativeAlgorithm")
    asked = [name for name in classes.members(ref) if name.startswith("is_")] if ref else ["is_eagle", "is_eagle3"]
    return FACTS | {name: name in ("is_eagle", "is_eagle3", "is_some", "is_speculative") for name in asked}


def calls(classes: Classes, arguments: Record) -> list[Call]:
    """Every call on the target and the drafter under EAGLE-3, in the order in which they come."""
    source = classes.source
    draft_side = [call for module in _worker_modules(classes, arguments) for call in _worker_calls(source, module)]
    names = sorted(_runner_names(source))
    modules = [m for m in _callers(source, names) if not any(m == call.site.module for call in draft_side)]
    runner = source.module("sglang.srt.model_executor.model_runner")
    early = reachable(source, "ModelRunner.__init__", frozenset({*modules, *([runner] if runner else [])}))
    found = []
    for module in modules:
        for site in sites(source, module, tuple(names)):
            if site.called and site.under("eagle") is not False:
                found.append(Call("target", site, _stage(site, site.function in early)))
    return sorted([*found, *draft_side], key=lambda call: [call.stage.startswith(s) for s in _STAGES].index(True))


def _stage(site: Site, early: bool) -> str:
    where = f"{site.module} {site.function}".lower()
    loaded = "the target's weights are loaded" if early else "target and drafter are loaded"
    if re.search("autotune|dummy|warm", where):
        return f"at kernel warm-up, after {loaded}"
    if "graph" in where or "capture_" in where.split("/")[-1].split(".py")[1]:
        return f"at graph capture, after {loaded}"
    return f"behind graph capture, after {loaded}" if early else f"once {loaded}, before graph capture"


def _runner_names(source: EngineSource) -> set[str]:
    """Methods of target models that are about EAGLE-3 by name."""
    found = set[str]()
    for module in source.containing(["eagle3_"], [MODELS])["eagle3_"]:
        found |= set(re.findall(r"def (\w*eagle3_\w+)\(", source.text(module)))
    return found


def _callers(source: EngineSource, names: list[str]) -> list[str]:
    found = source.containing([f".{name}(" for name in names], ["srt/"])
    return sorted({m for modules in found.values() for m in modules if not m.startswith(f"{source.name}/{MODELS}")})


def _worker_modules(classes: Classes, arguments: Record) -> list[str]:
    """Where the draft worker for these arguments is, by speculative/spec_info.py, and the helpers it imports."""
    source = classes.source
    algorithm = classes.class_in(f"{source.name}/srt/speculative/spec_info.py", "SpeculativeAlgorithm")
    made: Any = UNKNOWN
    if algorithm:
        interpreter = Interpreter(classes, facts(classes) | {"get_platform_worker_cls": None}, {})
        interpreter.overrides |= {name: lambda value: value for name in ("resolving_view", "resolved_view")}
        made = interpreter.method(Instance(algorithm, ready=True), "create_worker", arguments)
    options = made.options if isinstance(made, Either) else [made]
    found = [option.ref.module for option in options if isinstance(option, Class)]
    folder = f"{source.name}/srt/speculative/"
    found = found or [m for m in sorted(source.modules) if re.fullmatch(rf"{folder}eagle_worker\w*\.py", m)]
    return list(dict.fromkeys([*found, *(h for m in found for h in imported_modules(source, m, folder))]))


def _worker_calls(source: EngineSource, module: str) -> Iterator[Call]:
    if not _MODEL.search(source.text(module)):
        return
    for site in sites(source, module):
        side = "target" if _TARGET.search(site.receiver) else "drafter" if _DRAFTER.search(site.receiver) else ""
        ours = site.name not in _OF_TORCH and not site.name.startswith("__") and site.under("eagle3") is not False
        if side and ours:
            yield Call(side, site, "when the drafter gets the target's embedding, after both are loaded")
