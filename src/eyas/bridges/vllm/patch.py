"""What is missing in vLLM's source for a target: the members of the protocol SupportsEagle3."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from eyas.bridges.changes import CannotPatchError, Change, Members, passing_on
from eyas.bridges.code.classes import Classes, ClassRef, Member
from eyas.bridges.code.interpreter import Interpreter
from eyas.bridges.code.values import Instance, Raised, Record
from eyas.bridges.target import Target
from eyas.bridges.vllm.calls import find_architecture, prepared, protocol, vllm_config
from eyas.bridges.wrapping import look_inside


def changes(classes: Classes, target: Target) -> list[Change]:
    """Nothing where nothing is missing. Raises CannotPatchError where passing calls on would not be enough."""
    refs = find_architecture(classes, target.architecture)
    if not refs:
        raise CannotPatchError(f"{classes.source.label} registers no {target.architecture or 'model without a name'}")
    return [change for ref in refs for change in _members(classes, ref, target)]  # one class for each platform


def _members(classes: Classes, ref: ClassRef, target: Target) -> Iterator[Change]:
    interface = protocol(classes)
    if interface is None:
        raise CannotPatchError(f"{classes.source.label} has no SupportsEagle3")
    sizes = {key: target.size(key) for key in ("vocab_size", "num_hidden_layers")}
    run = prepared(Interpreter(classes, {}, {}), sizes)
    names = run.protocol(interface)
    missing = [name for name in names if not classes.find(ref, name)]
    config = Record(dict(target.config), frozenset())
    wrapper = Instance(ref, [], {"vllm_config": vllm_config(config), "prefix": ""})
    wrapped = look_inside(run, wrapper, names)
    if missing and wrapped.kind != "delegate":
        hint = "; eyas launch decides it at the start instead" if wrapped.kind == "undecided" else ""
        raise CannotPatchError(f"{ref.name} lacks {' and '.join(missing)}, and {wrapped.reason}{hint}")
    for model in wrapped.models if missing else [wrapper]:
        try:  # the default asserts that what holds the decoder layers can capture them
            run.method(model, "set_aux_hidden_state_layers", (1, 2, 3))
        except Raised as raised:
            raise CannotPatchError(f"{raised.where} raises {raised.kind}: {raised.message}") from raised
    if not missing:
        return
    flags, methods = list[str](), list[str]()
    for name in missing:
        member = classes.find(interface, name)
        node = member.node if isinstance(member, Member) else None
        if isinstance(node, ast.AnnAssign | ast.Assign) and node.value is not None:
            flags.append(f"{name} = {ast.unparse(node.value)}\n")
        elif node is not None:
            methods.append(passing_on(name, node, wrapped.attribute))
    what = f"{ref.name}: {', '.join(missing)}, passed on to {wrapped.inner} in self.{wrapped.attribute}"
    text = "\n".join(["".join(flags), *methods] if flags else methods)
    yield Members(ref.module, ref.name, ref.line, text, what)
