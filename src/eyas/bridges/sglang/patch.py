"""What is missing in SGLang's source for a target: methods of a wrapper, and the drafter's layers at graph capture."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from eyas.bridges.changes import Argument, CannotPatchError, Change, Members, passing_on
from eyas.bridges.code.classes import Classes, ClassRef, Member, Undecided
from eyas.bridges.code.interpreter import Interpreter
from eyas.bridges.code.values import Instance, Record
from eyas.bridges.sglang.calls import Call, calls, facts, find_architecture
from eyas.bridges.target import Target
from eyas.bridges.wrapping import look_inside

_EXTRA = "set_embed_and_head"  # nothing calls it on a target; it belongs to the three, and upstream adds it too
_EXAMPLE = Record({"disable_overlap_schedule": True, "enable_multi_layer_eagle": False})


def changes(classes: Classes, target: Target) -> list[Change]:
    """Nothing where nothing is missing. Raises CannotPatchError where passing calls on would not be enough."""
    refs = find_architecture(classes, target.architecture)
    if not refs:
        raise CannotPatchError(f"{classes.source.label} registers no {target.architecture or 'model without a name'}")
    asked = [call for call in calls(classes, _EXAMPLE) if call.side == "target" and call.site.called]
    return [*_members(classes, refs[0], target, asked), *_arguments(asked)]


def _members(classes: Classes, ref: ClassRef, target: Target, asked: list[Call]) -> Iterator[Change]:
    names = list(dict.fromkeys(call.name for call in asked if not call.site.asked_first))
    found = {name: classes.find(ref, name) for name in names}
    if unclear := [answer.reason for answer in found.values() if isinstance(answer, Undecided)]:
        raise CannotPatchError(f"{ref.name}: {unclear[0]}; eyas launch decides it at the start instead")
    missing = [name for name in names if found[name] is None]
    if not missing:
        return
    wrapper = Instance(ref, [], {"config": Record(dict(target.config), frozenset())})
    wrapped = look_inside(Interpreter(classes, facts(classes), {}), wrapper, names)
    if wrapped.kind != "delegate":
        hint = "; eyas launch decides it at the start instead" if wrapped.kind == "undecided" else ""
        raise CannotPatchError(f"{ref.name} lacks {' and '.join(missing)}, and {wrapped.reason}{hint}")
    inner = wrapped.models[0].ref
    if classes.find(ref, _EXTRA) is None and classes.find(inner, _EXTRA) and _EXTRA not in missing:
        missing.append(_EXTRA)
    methods = [classes.find(inner, name) for name in missing]
    written = [
        passing_on(name, method.node, wrapped.attribute)
        for name, method in zip(missing, methods, strict=True)
        if isinstance(method, Member)
    ]
    what = f"{ref.name}: {', '.join(missing)}, passed on to {wrapped.inner} in self.{wrapped.attribute}"
    yield Members(ref.module, ref.name, ref.line, "\n".join(written), what)


def _arguments(asked: list[Call]) -> Iterator[Change]:
    """Graphs captured without saying which layers: they get those that the runner names later (pull request 22836)."""
    named = next((call for call in asked if call.name.startswith("set_") and _given(call)), None)
    if named is None:
        return
    owner = f"{named.site.receiver.removesuffix('.model')}."
    said = ast.unparse(_given(named)[0])
    for call in asked:
        if call.name == named.name and not _given(call) and call.stage.startswith("at graph"):
            holder = f"{call.site.receiver.removesuffix('.model')}."
            if not (said.startswith(owner) and call.site.receiver.endswith(".model")):
                raise CannotPatchError(f"{call.site.module}:{call.site.line}: which layers to give it is not plain")
            argument = holder + said.removeprefix(owner)
            function = f"{call.site.receiver}.{call.name}"
            yield Argument(call.site.module, function, argument, f"{function}: graphs are captured with {argument}")


def _given(call: Call) -> list[ast.expr]:
    node = call.site.node
    return [*node.args, *(keyword.value for keyword in node.keywords)] if isinstance(node, ast.Call) else []
