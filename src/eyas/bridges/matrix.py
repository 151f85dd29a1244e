"""Every architecture that an engine registers, and whether it can be a target of EAGLE-3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from eyas.bridges.code.classes import Classes, ClassRef, Meaning, Undecided
from eyas.bridges.code.interpreter import Interpreter
from eyas.bridges.code.source import EngineSource, SourceError, collector_paused
from eyas.bridges.code.values import Instance, Raised, Record
from eyas.bridges.sglang import calls as sglang
from eyas.bridges.vllm import calls as vllm
from eyas.bridges.wrapping import look_inside

Status = Literal["ready", "delegate", "cannot", "undecided"]


@dataclass(frozen=True)
class Row:
    """``delegate``: a wrapper that forwards nothing, around a model that has it all. ``reason`` says why not ready."""

    architecture: str
    status: Status
    reason: str = ""
    attribute: str = ""  # where a wrapper holds its language model
    inner: str = ""


def matrix(source: EngineSource) -> list[Row]:
    """Without a config: what depends on one is undecided."""
    rows = _sglang if source.name == "sglang" else _vllm
    with collector_paused():
        return sorted(rows(Classes(source)), key=lambda row: row.architecture.lower())


def _sglang(classes: Classes) -> Iterator[Row]:
    arguments = Record({"disable_overlap_schedule": True, "enable_multi_layer_eagle": False})
    asked = [call for call in sglang.calls(classes, arguments) if call.side == "target" and call.site.called]
    names = list(dict.fromkeys(call.name for call in asked if not call.site.asked_first))
    known = sglang.facts(classes)
    for architecture, module in sglang.registry(classes.source).items():
        refs = [m for m in _meanings(classes, module, architecture) if isinstance(m, ClassRef)]
        if len(refs) == 1:
            target = Instance(refs[0], [], {"config": Record({})})
            yield _row(architecture, target, Interpreter(classes, known, {}), names)
        else:
            yield Row(architecture, "undecided", f"its class is not to be found in {classes.source.short(module)}")
        classes.forget()


def _meanings(classes: Classes, module: str, name: str) -> list[Meaning]:
    try:
        return classes.meanings(module, name)
    except SourceError:
        return []


def _vllm(classes: Classes) -> Iterator[Row]:
    interface = vllm.protocol(classes)
    names = Interpreter(classes, {}, {}).protocol(interface) if interface else []
    for architecture, _ in sorted(vllm.tables(classes).items(), key=lambda item: item[1]):  # a module's at once
        rows = []
        for ref in vllm.find_architecture(classes, architecture):
            interpreter = vllm.prepared(Interpreter(classes, {}, {}), {"vocab_size": None, "num_hidden_layers": None})
            target = Instance(ref, [], {"vllm_config": vllm.vllm_config(Record({})), "prefix": ""})
            row = _row(architecture, target, interpreter, names)
            rows.append(_holds_layers(row, interpreter, target) if row.status == "ready" else row)
        reason = (
            "differs by platform: " + " or ".join(r.status for r in rows) if rows else "its module finds it at run time"
        )
        by_platform = Row(architecture, "undecided", reason)
        yield rows[0] if len({row.status for row in rows}) == 1 else by_platform
        classes.forget()


def _row(architecture: str, target: Instance, interpreter: Interpreter, names: list[str]) -> Row:
    try:
        found = {name: interpreter.classes.find(target.ref, name) for name in names}
        missing = [name for name, answer in found.items() if answer is None]
        if not missing:
            undecided = [answer.reason for answer in found.values() if isinstance(answer, Undecided)]
            return Row(architecture, "undecided", undecided[0]) if undecided else Row(architecture, "ready")
        inside = look_inside(interpreter, target, names)
    except SourceError as error:
        return Row(architecture, "undecided", str(error))
    reason = f"no {', '.join(missing)}" if len(missing) < len(names) else ""
    why = "; ".join(part for part in (reason, inside.reason) if part)
    return Row(architecture, inside.kind, why, inside.attribute, inside.inner)


def _holds_layers(row: Row, interpreter: Interpreter, target: Instance) -> Row:
    """vLLM's default setter asserts that what holds the decoder layers can capture them."""
    try:
        interpreter.method(target, "set_aux_hidden_state_layers", (1, 2, 3))
    except Raised as raised:
        return Row(row.architecture, "cannot", f"{raised.where}: {raised.message}")
    return row
