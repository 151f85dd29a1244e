"""Whether a target and a drafter have what vLLM asks of them."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from eyas.bridges import architectures, layers, loading
from eyas.bridges.case import Case
from eyas.bridges.code.classes import FunctionRef, Undecided
from eyas.bridges.code.interpreter import Interpreter
from eyas.bridges.code.values import UNKNOWN, Function, Instance, Raised, Record, plain, truth
from eyas.bridges.loading import Loaded
from eyas.bridges.report import Fact, Problem, Report
from eyas.bridges.vllm import flags
from eyas.bridges.vllm.calls import (
    Runner,
    drafter_classes,
    fallback,
    find_architecture,
    image_lookups,
    names_of,
    prepared,
    protocol,
    runners,
    setup,
    vllm_config,
)  # fmt: skip
from eyas.bridges.wrapping import look_inside

_SPECULATORS = "speculators_model_type"
_ONE_NAME = "architectures is a list of one name: correct the drafter's config.json"


def check(case: Case, report: Report) -> None:
    """Adds all that is wrong, and what was understood, to ``report``."""
    report.problems += flags.problems(case)
    config, found = drafter_config(case)
    report.problems += found
    report.problems += target_problems(case, config, report)
    report.problems += drafter_problems(case, config, report)


def interpreter(case: Case) -> Interpreter:
    sizes = {key: case.target.size(key) for key in ("vocab_size", "num_hidden_layers")}
    return prepared(case.interpreter({}), sizes)


def targets(case: Case, config: Record) -> list[Instance]:
    """One object of every class that the target may be of, by platform."""
    classes = [] if _forced(case) == "transformers" else find_architecture(case.classes, case.target.architecture)
    if not classes and case.target.architecture and _forced(case) in ("auto", "transformers"):
        classes = fallback(case.classes, case.target_config())
    return [
        Instance(ref, [], {"vllm_config": vllm_config(case.target_config(), config), "prefix": ""}) for ref in classes
    ]


# The target


def _forced(case: Case) -> Any:
    return case.flags.get("model_impl", "auto")


def target_problems(case: Case, config: Record, report: Report) -> Iterator[Problem]:
    found = targets(case, config)
    if not found:
        yield architectures.unknown_target(case)
        return
    if not find_architecture(case.classes, case.target.architecture):
        yield Problem(
            "undecided",
            f"{case.source.label} registers no {case.target.architecture or 'model without a name'}: it is run by "
            f"transformers' own modules, if those of its transformers can be ({found[0].ref.name})",
            "dies before loading where they cannot",
            f"take a {case.source.name} that has it (eyas check --matrix lists what this one has), or see that its "
            "transformers does",
        )
    places = " or ".join(f"{t.ref.name} ({case.source.short(t.ref.module)}:{t.ref.line})" for t in found)
    report.facts.append(Fact("target class", places + (" by platform" if len(found) > 1 else "")))
    default, *others = usable(case)
    for runner in (default, *others):
        problems = [p for target in targets(case, config) for p in runner_problems(case, runner, target, config)]
        for problem in dict.fromkeys(problems):
            yield problem if runner is default else as_other(problem, runner)
    for target in targets(case, config)[:1]:
        yield from image_problems(case, target)


def usable(case: Case) -> list[Runner]:
    """The model runner that is used, then those that may be: V2 needs Triton, a variable chooses (config/vllm.py)."""
    found = sorted(runners(case.classes), key=lambda runner: runner.label, reverse=True)
    chosen = case.environment.get("VLLM_USE_V2_MODEL_RUNNER", "")
    if chosen in ("0", "1"):
        label = "V2" if chosen == "1" else "V1"
    else:
        label = "V1" if case.source.requires("torch").endswith("+cpu") else ""
    return [runner for runner in found if not label or runner.label == label] or found


def as_other(problem: Problem, runner: Runner) -> Problem:
    """A problem under a model runner that is not the one used by default."""
    severity = problem.severity if problem.severity == "note" else "undecided"
    return replace(
        problem, severity=severity, evidence=f"only with the {runner.label} model runner: {problem.evidence}"
    )


def runner_problems(case: Case, runner: Runner, target: Instance, config: Record) -> Iterator[Problem]:
    run = interpreter(case)
    run.facts["hf_config"] = config
    interface = protocol(case.classes)
    names = run.protocol(interface) if interface else []
    missing = [name for name in names if not case.classes.find(target.ref, name)]
    undecided = [f for name in names if isinstance(f := case.classes.find(target.ref, name), Undecided)]
    at = runner.site.at(case.source)
    try:
        setup(run, runner, target, config)
    except Raised as raised:
        inside = look_inside(run, target, names)
        passes = f"{inside.inner} in self.{inside.attribute} has it: start with eyas launch, which passes it on"
        yield Problem(
            "fails",
            f"{target.ref.name} lacks {', '.join(missing) or 'a part'} of SupportsEagle3; {raised.where} raises "
            f"{raised.kind}: {raised.message}",
            "dies after target and drafter are loaded",
            passes if inside.kind == "delegate" else f"{inside.reason}: a newer vllm, another engine, or Eyas itself",
            plugin="cures" if inside.kind == "delegate" else "",
        )
        return
    found = captured(run)
    if undecided or found is None:
        reason = undecided[0].reason if undecided else "what holds the decoder layers is chosen at run time"
        yield from layers.judge(case, None, f"{target.ref.name}: {reason} ({at})")
        return
    ids, where = found
    if run.calls.get("OutputRecorder") and min(ids) < 1:
        yield Problem(
            "fails",
            f"{where}: entry id {min(ids)} is the output of layer {min(ids) - 1}, which is not there",
            "dies after target and drafter are loaded: KeyError",
            "transformers' own modules give outputs of layers only: a drafter with other layer ids, or Eyas itself",
        )
        return
    yield from layers.judge(case, ids, f"{where}, called by {at} ({runner.label} model runner)")


def captured(run: Interpreter) -> tuple[tuple[int, ...], str] | None:
    """The entry ids that a runner's function set on a target, and where. None: they cannot be known.

    Models of vLLM keep them. On the Transformers backend transformers records the outputs of layers, each looked up by
    its number in a table that is filled while the model is built.
    """
    kept = [a for a in run.assigned if a.name == "aux_hidden_state_layers"]
    values = {tuple(a.value) for a in kept if plain(a.value) and a.value}
    if kept or not run.calls.get("OutputRecorder"):
        return (values.pop(), kept[-1].where) if len(values) == 1 else None
    outputs = [a for a in run.looked_up if type(a.value) is int and "layer" in a.name]
    if not outputs or not all(a.certain for a in outputs):
        return None
    return tuple(a.value + 1 for a in outputs), outputs[-1].where


def image_problems(case: Case, target: Instance) -> Iterator[Problem]:
    """v1/spec_decode: the token that stands for an image, under the name that this class's config has to have."""
    for module, branch in image_lookups(case.source):
        run = interpreter(case)
        run.facts["get_model_name"] = target.ref.name
        config = case.target_config()
        target = Instance(target.ref, attrs={"config": config}, ready=True, opaque=True)
        if truth(run.get(target, "supports_multimodal", False)) is not True:
            return
        with contextlib.suppress(Raised):  # what else is asked of the model is not this question
            run.block(module, branch.body, {"target_model": target})
        records = [config, *(value for value in config.values.values() if isinstance(value, Record))]
        for key in [key for record in records for key in record.asked if "token" in key]:
            has = [name for name in case.target.config if re.search("(image|media).*token", name)]
            yield Problem(
                "fails" if has else "undecided",
                f"{case.source.short(module)}:{branch.lineno} reads {key} of the target's config, which "
                + (f"has {', '.join(has)} instead" if has else "does not name it"),
                "dies after both are loaded: AttributeError (with the V1 model runner)",
                f"--hf-overrides '{{\"{key}\": ...}}' with the id of the image token",
                "https://github.com/vllm-project/vllm/issues/48700",
                plugin="completes" if key == "image_token_index" else "",
            )


# The drafter


def drafter_config(case: Case) -> tuple[Record, list[Problem]]:
    """The config object that vLLM makes of the drafter's config.json, and what it refuses."""
    raw = dict(case.checkpoint.config)
    if _SPECULATORS in raw:
        record, found = _speculators(case, raw)
        return record, [*found, *_rope_names(case, record)]
    record = case.drafter_config(raw)
    if "model_type" not in raw:
        return record, [architectures.no_model_type(case)]
    found = list(_rope_names(case, record))
    module = case.source.module("vllm.transformers_utils.configs.eagle")
    ref = case.classes.class_in(module, "EAGLEConfig") if module else None
    if ref is not None:
        run = interpreter(case)
        run.believed.add(ref.module)
        try:
            run.build(Instance(ref, [], {"model": record, "method": "eagle3"}))
        except Raised as raised:
            named = raw.get("architectures")
            sound = isinstance(named, list) and len(named) == 1 and isinstance(named[0], str)
            found.append(_refused(raised, f"eyas convert --to {case.source.name}" if sound else _ONE_NAME))
        named = [kwargs.get("architectures") for _, kwargs in run.calls.get("__init__", [])]
        named = [names for names in named if isinstance(names, list) and plain(names)]
        record.values["architectures"] = named[-1] if named else UNKNOWN
    return record, found


def _refused(raised: Raised, fix: str) -> Problem:
    evidence = f"{raised.where} raises {raised.kind}: {raised.message}"
    return Problem("fails", evidence, "dies at the start", fix)


def _rope_names(case: Case, record: Record) -> Iterator[Problem]:
    """transformers_utils/config.py: older names of RoPE kinds are replaced by those of today, or refused."""
    module = case.source.module("vllm.transformers_utils.config")
    for function in _rope_patches(case.source.tree(module)) if module else ():
        for key in ("rope_parameters", "rope_scaling"):
            if isinstance(table := record.values.get(key), dict):
                record.values[key] = table = dict(table)
                run = interpreter(case)
                run.believed.add(str(module))
                try:
                    run.call(Function(FunctionRef(str(module), function)), table)
                except Raised as raised:
                    yield _refused(
                        raised, f"{key} names one kind of RoPE, with what belongs to it: correct config.json"
                    )


def _rope_patches(tree: ast.Module) -> list[ast.FunctionDef]:
    """The functions, mostly one inside another, that write "rope_type" into the table they are given."""
    found = []
    for node in ast.walk(tree):
        given = node.args.args[0].arg if isinstance(node, ast.FunctionDef) and node.args.args else ""
        written = [n for n in ast.walk(node) if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)]
        if isinstance(node, ast.FunctionDef) and f"{given}['rope_type']" in map(ast.unparse, written):
            found.append(node)
    return [f for f in found if not any(other is not f and other in ast.walk(f) for other in found)]


def _speculators(case: Case, raw: dict[str, Any]) -> tuple[Record, list[Problem]]:
    """transformers_utils/configs/speculators/algos.py: one function for each kind, registered by a decorator."""
    kind, inner = raw[_SPECULATORS], dict(raw.get("transformer_layer_config") or {})
    for module in case.source.containing(["register_speculator"])["register_speculator"]:
        for node in case.source.tree(module).body:
            marks = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
            if isinstance(node, ast.FunctionDef) and any(repr(kind) in mark for mark in marks):
                run = interpreter(case)
                run.believed.add(module)
                try:
                    run.call(run.global_name(module, node.name), raw, inner)
                except Raised as raised:
                    text = f"{raised.where} raises {raised.kind}: {raised.message}"
                    return case.drafter_config(inner), [
                        Problem("fails", text, "dies at the start", "eyas convert --to vllm")
                    ]
                return case.drafter_config(inner), []
    text = f"speculators_model_type {kind!r} is none that {case.source.label} knows"
    return case.drafter_config(inner), [Problem("fails", text, "dies at the start", "eyas convert --to vllm")]


def drafter_problems(case: Case, config: Record, report: Report) -> Iterator[Problem]:
    named = config.values.get("architectures")
    name = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    classes = find_architecture(case.classes, name)
    if not classes:
        yield architectures.unknown_drafter(case, name)
        return
    ref = classes[0]
    report.facts.append(Fact("drafter class", f"{ref.name} ({case.source.short(ref.module)}:{ref.line})"))
    run = interpreter(case)
    arguments = {"vllm_config": vllm_config(case.target_config(), config), "prefix": ""}
    loaded = loading.load(case, ref, run, arguments, config, _share(case))
    yield from loading.problems(case, loaded)
    yield from _one_of(case, loaded)
    yield from _length(case)


def _share(case: Case) -> Any:
    """v1/spec_decode/llm_base_proposer.py lends the embedding if widths agree, and the head."""

    def share(loaded: Loaded) -> None:
        run, drafter = loaded.interpreter, loaded.instance
        same_width = case.target.size("hidden_size") in (None, case.reading.config.hidden_size)
        lent = {"embed_tokens": ("has_own_embed_tokens", same_width), "lm_head": ("has_own_lm_head", True)}
        for parameter in loaded.parameters.known.values():
            for part, (flag, possible) in lent.items():
                if f"{part}." in parameter.name and possible and truth(run.get(drafter, flag, False)) is not True:
                    parameter.filled = True

    return share


def _one_of(case: Case, loaded: Loaded) -> Iterator[Problem]:
    for kinds, where in drafter_classes(case.classes, loaded.interpreter):
        if loaded.interpreter.is_a(loaded.instance, kinds) is False:
            yield Problem(
                "undecided",
                f"{where} asserts that it is of {', '.join(names_of(kinds))}; {loaded.instance.ref.name} is not",
                "dies at the first draft with the V1 model runner",
                "VLLM_USE_V2_MODEL_RUNNER=1, or another drafter class",
            )


def _length(case: Case) -> Iterator[Problem]:
    """config/speculative.py raises the drafter's max_position_embeddings to the target's, in versions that do."""
    found, wanted = case.reading.config.max_position_embeddings, case.target.size("max_position_embeddings")
    module = case.source.module("vllm.config.speculative") or case.source.module("vllm.config")
    raises = module and re.search(r"draft\w*(\.hf_config)?\.max_position_embeddings = ", case.source.text(module))
    if wanted and found < wanted and not raises:
        yield Problem(
            "fails",
            f"max_position_embeddings of the drafter is {found}, the target's {wanted}; {case.source.label} sizes the "
            "drafter's rotary table by it",
            f"prompts beyond {found} tokens read outside the table: a crash, or garbage",
            f"raise max_position_embeddings in the drafter's config.json to {wanted}",
            "https://github.com/vllm-project/vllm/issues/48894",
        )
