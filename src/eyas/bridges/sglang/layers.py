"""Which layers SGLang captures: its own code, run on the drafter's config and the target's class."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eyas.bridges import layers
from eyas.bridges.case import Case
from eyas.bridges.code.classes import ClassRef
from eyas.bridges.code.values import UNKNOWN, Instance, Raised, plain
from eyas.bridges.report import Problem
from eyas.bridges.sglang.calls import IDS, MODELS, Call, facts

_KNOWN_BUG = "https://github.com/sgl-project/sglang/pull/22836"


@dataclass(frozen=True)
class Capture:
    """What one call of the setter leaves behind: entry ids, None where they cannot be known."""

    ids: list[int] | None
    where: str


def problems(case: Case, target: Instance, setters: list[Call], flags: dict[str, Any]) -> Iterator[Problem]:
    """``setters``: the calls that choose the layers, in the order in which they come."""
    asked = any(_arguments(call) for call in setters)
    written, where = read_ids(case) if asked else (None, "no place: this version knows its default layers only")
    if written is UNKNOWN:
        yield from layers.judge(case, None, where)
        return
    captures = []
    for call in setters:
        capture = run_setter(case, target, call, written if _arguments(call) else None)
        if capture is None:
            yield _none_named(case, where) if written == [] and _arguments(call) else _does_nothing(target, call, case)
            return
        captures.append((call, capture))
    for call, capture in captures[-1:]:
        evidence = f"{capture.where}, called by {call.site.at(case.source)}, ids read at {where}"
        unfit = [*_beyond(case, capture), *_before_the_first(case, capture)]
        yield from unfit or layers.judge(case, capture.ids, evidence)
    yield from _graphs(case, captures, flags)


def read_ids(case: Case) -> tuple[Any, str]:
    """The ids that SGLang reads from the drafter's config, None for its default, and where it does."""
    source = case.source
    for module in source.containing([IDS], ["srt/"])[IDS]:
        if module.startswith(f"{source.name}/{MODELS}"):
            continue
        for block, line in _reading_blocks(source.tree(module)):
            known = facts(case.classes) | {"hf_config": case.drafter_config()}
            interpreter = case.interpreter(known)
            names = interpreter.block(module, block, {})
            found = [(a.value, a.certain) for a in interpreter.assigned if a.name == IDS]
            found += [(names[IDS], True)] if IDS in names else []
            if found:
                value = found[-1][0]
                fine = plain(value) and all(certain or other == value for other, certain in found)
                return (value if fine else UNKNOWN), f"{source.short(module)}:{line}"
    return UNKNOWN, f"{source.label}: no code that reads {IDS}"


def _reading_blocks(tree: ast.Module) -> Iterator[tuple[list[ast.stmt], int]]:
    """The blocks about EAGLE-3 that read the ids: what is under the condition that asks for the algorithm."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "eagle3" in ast.unparse(node.test):
            nodes = [n for statement in node.body for n in ast.walk(statement)]
            keys = [n.lineno for n in nodes if isinstance(n, ast.Constant) and n.value == IDS]
            names = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr == IDS and isinstance(n.ctx, ast.Load)]
            lines = [*keys, *(n.lineno for n in names)]
            if lines:
                yield node.body, lines[0]


def _arguments(call: Call) -> bool:
    return isinstance(call.site.node, ast.Call) and bool(call.site.node.args or call.site.node.keywords)


def run_setter(case: Case, target: Instance, call: Call, ids: list[int] | None) -> Capture | None:
    """Calls the setter of the target's class. None: it does nothing at all."""
    interpreter = case.interpreter(facts(case.classes))
    interpreter.method(target, call.name, *([] if ids is None else [list(ids)]))
    named = [a for a in interpreter.assigned if re.search("capture|aux", a.name) and not isinstance(a.value, bool)]
    chosen = [a for a in named if a.value not in ([], ())]  # as it is before anyone chooses
    if not chosen and call.name not in interpreter.calls:
        return None
    values = {tuple(a.value) for a in chosen if isinstance(a.value, list | tuple) and plain(a.value)}
    certain = len(values) == 1 and all(plain(a.value) for a in chosen)
    where = chosen[-1].where if chosen else call.name
    return Capture(list(values.pop()) if certain else None, where)


def _does_nothing(target: Instance, call: Call, case: Case) -> Problem:
    return Problem(
        "fails",
        f"{call.name} of {target.ref.name} sets nothing on the model inside it (called at {call.site.at(case.source)})",
        "the target returns no states for the drafter: dies at the first forward, or at graph capture",
        "take a target class whose inner model captures states: see eyas check --matrix",
    )


def _none_named(case: Case, where: str) -> Problem:
    return Problem(
        "fails",
        f"{IDS} is [], read at {where}: no layer is captured, fc takes {case.reading.config.num_aux} states",
        "the target returns no states for the drafter: dies at the first forward, or at graph capture",
        f"remove {IDS} from the drafter's config.json: without the key SGLang takes its default layers",
    )


def _beyond(case: Case, capture: Capture) -> Iterator[Problem]:
    """Layers are looked at as they are entered, so the state after the last needs code of its own."""
    n, module = case.target.layers, _module(case, capture)
    text = case.source.text(module) if module else ""
    for index in [i for i in capture.ids or [] if n is not None and i >= n]:
        if index == n and re.search(
            r"(end_layer|num_(hidden_)?layers|len\(self\.layers\)) (not )?in self\.layers_to_cap", text
        ):
            continue
        yield Problem(
            "fails",
            f"{capture.where}: entry id {index} is never entered by a target of {n} layers",
            "one state is missing: dies at the first forward, the states are not as wide as fc",
            "the ids are of another target, or in the other convention: " + layers.PROBE,
        )


def _before_the_first(case: Case, capture: Capture) -> Iterator[Problem]:
    """What enters layer 0 is the embedding alone: there is no residual yet, and some add it without asking."""
    for module in _models_of(case, _module(case, capture)) if 0 in (capture.ids or []) else []:
        for function in ast.walk(case.source.tree(module)):
            if not isinstance(function, ast.FunctionDef):
                continue
            for loop in [node for node in ast.walk(function) if isinstance(node, ast.For)]:
                try:
                    _enter_first(case, module, function, loop)
                except Raised as raised:
                    yield Problem(
                        "fails",
                        f"{capture.where}: entry id 0 is what enters the first layer, and {raised.where} adds the "
                        f"residual to it, which is None there: {raised.kind}",
                        "dies at the first forward, or at graph capture",
                        "take a drafter that does not listen to the embedding, a newer SGLang, or vLLM",
                    )
                    return


def _enter_first(case: Case, module: str, function: ast.FunctionDef, loop: ast.For) -> None:
    """Runs what a loop over the layers captures before the first of them. Raises Raised where that dies."""
    nothing = [
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and node.value.value is None
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    for test in [n for statement in loop.body for n in ast.walk(statement) if isinstance(n, ast.If)]:
        if not re.search(r"\w+ in self\.layers_to_capture", ast.unparse(test.test)):
            continue
        terms = [n for part in test.body for n in ast.walk(part) if isinstance(n, ast.BinOp)]
        states = [side.id for n in terms for side in (n.left, n.right) if isinstance(side, ast.Name)]
        known = dict.fromkeys(states, 0) | dict.fromkeys(nothing, None) | {ast.unparse(loop.target): 0}
        interpreter = case.interpreter(facts(case.classes))
        interpreter.believed.add(module)
        interpreter.block(module, test.body, known)


def _module(case: Case, capture: Capture) -> str:
    path = capture.where.split(":")[0]
    return next((module for module in case.source.modules if case.source.short(module) == path), "")


def _models_of(case: Case, module: str) -> list[str]:
    """A module of models, and those that its classes inherit from."""
    names = [node.name for node in case.source.tree(module).body if isinstance(node, ast.ClassDef)] if module else []
    refs = [ref for name in names if (ref := case.classes.class_in(module, name))]
    above = [a.module for ref in refs for a in case.classes.ancestry(ref)[0] if isinstance(a, ClassRef)]
    return list(dict.fromkeys([m for m in (module, *above) if m and f"/{MODELS}" in m]))


def _graphs(case: Case, captures: list[tuple[Call, Capture]], flags: dict[str, Any]) -> Iterator[Problem]:
    """Graphs captured with other layers than are set behind them: decoding then differs from prefill."""
    graphs = [(call, capture) for call, capture in captures if call.stage.startswith("at graph")]
    later = [capture for call, capture in captures if call.stage.startswith("behind")]
    if not graphs or not later or flags.get("disable_cuda_graph"):
        return
    call, capture = graphs[-1]
    if capture.ids is None or later[-1].ids is None or sorted(capture.ids) == sorted(later[-1].ids):
        return
    yield Problem(
        "silent",
        f"{call.site.at(case.source)} captures the CUDA graphs with the default layers, entry ids {capture.ids}; "
        f"the drafter's {later[-1].ids} are set only behind it",
        "decoding feeds the drafter other states than prefill did: less acceptance, without a word in the log",
        "start it with eyas launch, whose plugin repairs this; or use --disable-cuda-graph; or a newer SGLang",
        _KNOWN_BUG,
        plugin="cures",
    )
