"""What vLLM asks of a target and of a drafter, read off its model runners."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from eyas.bridges.code.callers import Site, sites
from eyas.bridges.code.classes import Classes, ClassRef, FunctionRef
from eyas.bridges.code.interpreter import Interpreter
from eyas.bridges.code.source import EngineSource
from eyas.bridges.code.values import UNKNOWN, Class, Frame, Function, Instance, Raised, Record
from eyas.bridges.vllm.loader import Loader

MODELS = ("model_executor/models/", "models/")
REGISTRY = "vllm/model_executor/models/registry.py"
INTERFACES = "vllm/model_executor/models/interfaces.py"
_MOST_LAYERS = 10_000  # of a model that anybody could load
_FACTS = {
    "is_last_rank": True, "is_first_rank": True, "world_size": 1, "model_parallel_is_initialized": False,
    "method": "eagle3", "parallel_drafting": False, "use_aux_hidden_state_outputs": True,
    "get_draft_quant_config": None,
}  # fmt: skip


@dataclass(frozen=True)
class Runner:
    """A function of a model runner that tells the target which layers to capture."""

    label: str  # "V1" or "V2"
    site: Site
    function: Function

    @property
    def module(self) -> str:
        return self.site.module


def find_architecture(classes: Classes, name: str) -> list[ClassRef]:
    """Several where the class differs by platform."""
    place = tables(classes).get(name)
    return _classes(classes, place) if place else []


def fallback(classes: Classes, config: Record) -> list[ClassRef]:
    """The class around transformers' own modules, by vLLM's own choice: for a target that it does not register."""
    module = classes.source.module("vllm.config.model")
    ref = classes.class_in(module, "ModelConfig") if module else None
    if ref is None or not classes.find(ref, "_get_transformers_backend_cls"):
        return []
    text = config.text_config()
    known = {
        "hf_config": config, "hf_text_config": text, "is_moe": any("expert" in key for key in text.values),
        "architectures": [], "runner": "auto",
    }  # fmt: skip
    run = Interpreter(classes, {}, {})
    run.believed.add(ref.module)
    try:
        name = run.method(Instance(ref, attrs=known, ready=True, opaque=True), "_get_transformers_backend_cls")
    except Raised:  # older ones look at the first architecture unasked, in tables that vLLM alone knows
        return []
    return find_architecture(classes, name) if isinstance(name, str) else []


@lru_cache(maxsize=8)
def tables(classes: Classes) -> dict[str, tuple[str, str]]:
    """Every table at the top level from a name to a module and a class in it."""
    interpreter = Interpreter(classes, {}, {})
    found: dict[str, tuple[str, str]] = {}
    for name, bindings in classes.bindings(REGISTRY).items() if REGISTRY in classes.source.modules else []:
        table = (
            interpreter.global_name(REGISTRY, name)
            if isinstance(getattr(bindings[-1].node, "value", None), ast.Dict)
            else None
        )
        if isinstance(table, dict):
            pairs = {
                k: v for k, v in table.items() if isinstance(v, tuple) and [type(part) for part in v] == [str, str]
            }
            found |= pairs
    return found


def _classes(classes: Classes, place: tuple[str, str]) -> list[ClassRef]:
    dotted = place[0] if place[0].startswith("vllm.") else f"vllm.model_executor.models.{place[0]}"
    module = classes.source.module(dotted)
    return [m for m in classes.meanings(module, place[1]) if isinstance(m, ClassRef)] if module else []


def prepared(interpreter: Interpreter, sizes: dict[str, int | None]) -> Interpreter:
    """Gives an interpreter what holds throughout vLLM: sizes of the target, and helpers that are done here."""
    known = {"get_vocab_size": sizes["vocab_size"], "get_total_num_hidden_layers": sizes["num_hidden_layers"]}
    interpreter.facts |= _FACTS | {name: size for name, size in known.items() if size is not None}
    interpreter.overrides |= {
        "make_layers": lambda count, *a, **k: _layers(count),
        "with_hf_config": lambda config, *a, **k: vllm_config(config),
        "init_vllm_registered_model": lambda *a, **k: _registered(interpreter, *a, **k),
        "initialize_model": lambda *a, **k: _initialised(interpreter, *a, **k),
        "AutoWeightsLoader": lambda module, *a, **k: Loader(interpreter, module),
        "SupportsMultiModal.get_language_model": lambda wrapper, *a: language_model(interpreter, wrapper),
    }
    return interpreter


def _layers(count: Any) -> Any:
    """models/utils.py: from which layer to which this rank has them, and all of them."""
    known = type(count) is int and 0 <= count <= _MOST_LAYERS
    return (0, count, [UNKNOWN] * count) if known else UNKNOWN


def vllm_config(config: Any, drafter: Record | None = None) -> Record:
    speculative = Record(
        {"draft_model_config": Record({"hf_config": drafter}), "parallel_drafting": False, "method": "eagle3"}
    )
    text = config.text_config() if isinstance(config, Record) else UNKNOWN
    model = Record({"hf_config": config, "hf_text_config": text})
    return Record({"model_config": model, "speculative_config": speculative if drafter else UNKNOWN})


def _initialised(interpreter: Interpreter, outer: Any = None, **given: Any) -> Any:
    """model_loader/utils.py: a model of the class that is passed on, or of the one that the config names."""
    whole, kind = given.get("vllm_config", outer), given.get("model_class")
    if isinstance(kind, Class):
        return Instance(kind.ref, [], {"vllm_config": whole, "prefix": ""})
    config = interpreter.attribute(interpreter.attribute(whole, "model_config"), "hf_config")
    return _registered(interpreter, hf_config=config) if kind is None else UNKNOWN


def _registered(interpreter: Interpreter, outer: Any = None, **given: Any) -> Any:
    """models/utils.py: an inner model by the architectures that are passed on, or that its own config names."""
    classes, config, named = interpreter.classes, given.get("hf_config"), given.get("architectures")
    if config is None and named is not None:  # then it is the outer one
        whole = given.get("vllm_config", outer)
        config = interpreter.attribute(interpreter.attribute(whole, "model_config"), "hf_config")
    if named is None and isinstance(config, Record):
        named = config.values.get("architectures")
    found = (
        find_architecture(classes, named[0]) if isinstance(named, list) and named and isinstance(named[0], str) else []
    )
    return Instance(found[0], [], {"vllm_config": vllm_config(config), "prefix": ""}) if len(found) == 1 else UNKNOWN


def language_model(interpreter: Interpreter, wrapper: Instance) -> Any:
    """interfaces.py: what was assigned while ``_mark_language_model`` was open, or called language_model."""
    interpreter.build(wrapper, lenient=True)
    names = [name for name in marked_attributes(interpreter.classes, wrapper.ref) if name in wrapper.attrs]
    name = names[0] if len(names) == 1 else "language_model"
    return wrapper.attrs.get(name, UNKNOWN)


def marked_attributes(classes: Classes, ref: ClassRef) -> list[str]:
    member = classes.find(ref, "__init__")
    found = []
    for node in ast.walk(getattr(member, "node", ast.Module([], []))):
        if isinstance(node, ast.With) and any(
            "_mark_language_model" in ast.unparse(i.context_expr) for i in node.items
        ):
            for inner in ast.walk(node):
                if (
                    isinstance(inner, ast.Attribute)
                    and isinstance(inner.ctx, ast.Store)
                    and ast.unparse(inner.value) == "self"
                ):
                    found.append(inner.attr)
    return list(dict.fromkeys(found))


def protocol(classes: Classes) -> ClassRef | None:
    """The interface that a target must have."""
    return classes.class_in(INTERFACES, "SupportsEagle3") if INTERFACES in classes.source.modules else None


def runners(classes: Classes) -> list[Runner]:
    """The functions that call the setter of the interface, outside the models."""
    interface = protocol(classes)
    names = (
        [n.name for n in interface.node.body if isinstance(n, ast.FunctionDef) and n.name.startswith("set_")]
        if interface
        else []
    )
    found = []
    modules = {m for listed in classes.source.containing([f".{n}(" for n in names]).values() for m in listed}
    for module in sorted(m for m in modules if not in_models(classes.source, m)):
        for site in sites(classes.source, module, tuple(names)):
            scopes = [s for s in site.around if isinstance(s, ast.FunctionDef | ast.ClassDef)]
            if site.called and scopes and isinstance(scopes[-1], ast.FunctionDef):
                owner = classes.class_in(module, scopes[-2].name) if len(scopes) > 1 else None
                label = "V2" if re.search("worker/gpu/", module) else "V1"
                found.append(Runner(label, site, Function(FunctionRef(module, scopes[-1]), owner)))
    return found


def in_models(source: EngineSource, module: str) -> bool:
    return module.startswith(tuple(f"{source.name}/{folder}" for folder in MODELS))


def setup(interpreter: Interpreter, runner: Runner, target: Instance, drafter: Record) -> None:
    """Runs the function on a target. Raises Raised where the runner would."""
    interpreter.believed.add(runner.module)
    interpreter.facts["get_model"] = target
    function, speculative = runner.function, vllm_config(UNKNOWN, drafter).values["speculative_config"]
    known: dict[str, Any] = {"model": target, "speculative_config": speculative}
    if function.owner is None:
        interpreter.call(function, spec_config=speculative, **known)
        return
    bound = Instance(function.owner, attrs=known, ready=True, opaque=True)
    about = [
        s for s in runner.site.around if isinstance(s, ast.If) and re.search("aux_hidden|eagle3", ast.unparse(s.test))
    ]
    if about:  # a part of a long function, most of which is about other things
        interpreter.block(runner.module, [about[0]], {"self": bound})
    else:
        interpreter.call(Function(function.ref, function.owner, bound))


def names_of(kinds: Any) -> list[str]:
    return [
        kind.ref.name for kind in (kinds if isinstance(kinds, tuple | list) else [kinds]) if isinstance(kind, Class)
    ]


def drafter_classes(classes: Classes, interpreter: Interpreter) -> Iterator[tuple[Any, str]]:
    """Classes that a drafter must be one of, and where that is asserted."""
    source = classes.source
    for module in source.containing(["assert isinstance("], ["v1/spec_decode/"])["assert isinstance("]:
        for node in ast.walk(source.tree(module)):
            if isinstance(node, ast.Assert) and isinstance(node.test, ast.Call) and "Eagle3" in ast.unparse(node.test):
                kinds = interpreter.evaluate(node.test.args[1], Frame(module, {}))
                yield kinds, f"{source.short(module)}:{node.lineno}"


def image_lookups(source: EngineSource) -> Iterator[tuple[str, ast.If]]:
    """The branches that ask a multimodal target for the token that stands for an image."""
    for module in source.containing(["image_token_index"], ["v1/"])["image_token_index"]:
        for node in ast.walk(source.tree(module)):
            asked = isinstance(node, ast.If) and "supports_multimodal(" in ast.unparse(node.test)
            if isinstance(node, ast.If) and asked and "image_token_index" in ast.unparse(node):
                yield module, node
