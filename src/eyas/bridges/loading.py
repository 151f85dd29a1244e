"""What an engine's own drafter class makes of a checkpoint: built from its config, fed with its tensors' names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from eyas.bridges.case import Case
from eyas.bridges.code.classes import ClassRef
from eyas.bridges.code.interpreter import Interpreter
from eyas.bridges.code.values import UNKNOWN, Instance, Leaf, Parameters, Raised, Record, Tensor, truth
from eyas.bridges.report import Problem

_HARMLESS = re.compile(r"(^|\.)t2d$|rotary_emb")  # nothing is lost with these: t2d follows from d2t
_SILENT_KEYS = {  # change what a drafter computes without a tensor of their own
    "norm_before_residual": "the residual of the first layer starts from the normed state",
    "norm_output": "the next draft step gets the state after the final norm",
}
_RANDOM = "the server runs, acceptance is near zero, nothing in the log says why"
_CONVERT = "convert the drafter (eyas convert --to {engine}), or take a version of {engine} that reads it"


@dataclass
class Loaded:
    """A drafter in an engine. ``raised``: what ended it."""

    interpreter: Interpreter
    instance: Instance
    config: Record
    tensors: list[Tensor]
    parameters: Parameters = field(default_factory=Parameters)
    raised: Raised | None = None


def load(
    case: Case,
    ref: ClassRef,
    interpreter: Interpreter,
    arguments: dict[str, Any],
    config: Record,
    share: Callable[[Loaded], None],
) -> Loaded:
    """Runs ``__init__`` and ``load_weights`` of the class, then ``share``: what the engine lends from the target."""
    loaded = Loaded(interpreter, Instance(ref, [], arguments), config, case.tensors())
    try:
        interpreter.build(loaded.instance)
        loaded.parameters = interpreter.parameters(loaded.instance)
        interpreter.method(loaded.instance, "load_weights", [(t.name, t) for t in loaded.tensors])
        share(loaded)
    except Raised as raised:
        loaded.raised = raised
    return loaded


def problems(case: Case, loaded: Loaded) -> Iterator[Problem]:
    if loaded.raised:
        yield _ended(case, loaded.raised)
        return
    yield from _shapes(case, loaded)
    yield from _dropped(case, loaded)
    yield from _rope(case, loaded)
    yield from _keys(case, loaded)


def _ended(case: Case, raised: Raised) -> Problem:
    fix = _CONVERT.format(engine=case.source.name)
    if key := re.search(r"no attribute '(\w+)'", raised.message):
        fix = f"write {key[1]} into the drafter's config.json (eyas convert does)"
    return Problem(
        "fails",
        f"{raised.where} raises {raised.kind}: {raised.message}",
        "dies while the drafter is loaded, after the target's weights",
        fix,
    )


def _shapes(case: Case, loaded: Loaded) -> Iterator[Problem]:
    for parameter, tensor in loaded.interpreter.filled:
        if parameter.shape is not None and parameter.shape != tensor.shape:
            yield Problem(
                "fails",
                f"{tensor.name} is {list(tensor.shape)}, {loaded.instance.ref.name} of {case.source.label} builds "
                f"{parameter.name} as {list(parameter.shape)} ({case.source.short(loaded.instance.ref.module)})",
                "dies while the drafter is loaded, after the target's weights: a shape mismatch",
                "config.json must say what the tensors are: hidden and vocabulary sizes, and as many layer ids (or "
                "num_aux_hidden_states) as fc takes states, where this engine reads them",
            )


def _dropped(case: Case, loaded: Loaded) -> Iterator[Problem]:
    dropped = [t.name for t in loaded.tensors if not t.used and not _HARMLESS.search(t.name)]
    empty = [p.name for p in loaded.parameters.known.values() if not p.filled]
    module = case.source.short(loaded.instance.ref.module)
    if dropped:
        yield Problem(
            "silent",
            f"{module}: load_weights of {loaded.instance.ref.name} drops {_list(dropped)} without a word",
            f"{_random(empty)}{_RANDOM}"
            if empty
            else f"the drafter computes something else than it was trained as; {_RANDOM}",
            _CONVERT.format(engine=case.source.name),
        )
    elif empty:
        yield Problem(
            "silent",
            f"{module}: nothing in the checkpoint or the target fills {_list(empty)}",
            f"{_random(empty)}{_RANDOM}",
            "the checkpoint lacks them; export the drafter again, with its embedding if its width is not the target's",
        )


def _random(names: list[str]) -> str:
    return f"{_list(names)} keep{'s' if len(names) == 1 else ''} what memory held; "


def _rope(case: Case, loaded: Loaded) -> Iterator[Problem]:
    """get_rope is where every engine makes its rotary table, whatever the config called its numbers."""
    wanted = case.reading.config.rope
    for args, kwargs in loaded.interpreter.calls.get("get_rope", [])[:1]:
        call = Leaf("get_rope", args, kwargs)
        table: dict[str, Any] = next(
            (kwargs[k] for k in ("rope_parameters", "rope_scaling") if isinstance(kwargs.get(k), dict)), {}
        )
        theta = kwargs.get("base", table.get("rope_theta", call.argument(3, "base")))
        kind = table.get("rope_type", table.get("type", "default"))
        read = {"theta": (theta, wanted.get("rope_theta")), "scaling": (kind, wanted.get("rope_type"))}
        for name, (found, meant) in read.items():
            if found is not UNKNOWN and found != meant and None not in (found, meant):
                yield Problem(
                    "silent",
                    f"{case.source.short(loaded.instance.ref.module)} reads RoPE {name} {found}, the drafter "
                    f"was trained with {meant}: this engine looks at {_rope_keys(case)}",
                    "positions are rotated wrongly: acceptance decays with the length of the text",
                    f"write {_rope_keys(case)} into the drafter's config.json (eyas convert writes both spellings)",
                )


def _rope_keys(case: Case) -> str:
    older = case.source.requires("transformers").startswith("4.")
    return "rope_theta and rope_scaling" if older else "rope_parameters"


def _keys(case: Case, loaded: Loaded) -> Iterator[Problem]:
    """A switch that no file of the drafter's class mentions cannot have an effect."""
    modules = {ref.module for ref in case.classes.ancestry(loaded.instance.ref)[0] if isinstance(ref, ClassRef)}
    texts = [case.source.text(module) for module in sorted(modules)]
    for key, meaning in _SILENT_KEYS.items():
        if getattr(case.reading.config, key) and not any(key in text for text in texts):
            yield Problem(
                "silent",
                f"{key} is true ({meaning}); {case.source.label} has no such drafter: "
                f"{case.source.short(loaded.instance.ref.module)} never reads it",
                f"the drafter computes something else than it was trained as; {_RANDOM}",
                "run it with vLLM or Eyas, or train without it",
            )
        read = truth(loaded.config.values.get(key, False))
        if any(key in text for text in texts) and read is not None and read != getattr(case.reading.config, key):
            yield Problem(
                "silent",
                f"{key} is {getattr(case.reading.config, key)}, {case.source.label} takes it for {read}",
                f"the drafter computes something else than it was trained as; {_RANDOM}",
                f"write {key} where {case.source.name} reads it: at the top level of config.json",
            )


def _list(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
