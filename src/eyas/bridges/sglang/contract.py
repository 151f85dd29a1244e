"""Whether a target and a drafter have what SGLang asks of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from eyas.bridges import architectures, converting, loading
from eyas.bridges.case import Case
from eyas.bridges.code.classes import ClassRef, Undecided
from eyas.bridges.code.values import Instance, Raised, Record, Tensor, truth
from eyas.bridges.loading import Loaded
from eyas.bridges.report import Fact, Problem, Report
from eyas.bridges.sglang import dtypes, flags, layers, quantization
from eyas.bridges.sglang.calls import Call, calls, facts, find_architecture
from eyas.bridges.wrapping import Wrapped, look_inside


def check(case: Case, report: Report) -> None:
    """Adds all that is wrong, and what was understood, to ``report``."""
    arguments, found = flags.resolve(case)
    report.problems += found
    contract = calls(case.classes, arguments)
    report.problems += target_problems(case, contract, arguments, report)
    report.problems += drafter_problems(case, contract, arguments, report)


# The target


def target_problems(case: Case, contract: list[Call], arguments: Record, report: Report) -> Iterator[Problem]:
    classes = find_architecture(case.classes, case.target.architecture)
    if not classes:
        yield architectures.unknown_target(case)
        return
    ref = classes[0]
    report.facts.append(Fact("target class", f"{ref.name} ({case.source.short(ref.module)}:{ref.line})"))
    asked = [call for call in contract if call.side == "target" and call.site.called and not call.site.asked_first]
    target = Instance(ref, [], {"config": case.target_config()})
    names = list(dict.fromkeys(call.name for call in asked))
    if any(_lacks(case, ref, name) for name in names):
        wrapped = look_inside(case.interpreter(facts(case.classes)), target, names)
        yield from missing_methods(case, ref, asked, wrapped)
        if not wrapped.models:
            return
        target = wrapped.models[0]  # what a wrapper is made to pass on to
    for call in asked:
        try:
            if call.name.startswith("get_"):
                case.interpreter(facts(case.classes)).method(target, call.name)
        except Raised as raised:
            yield _dies(case, raised, call)
    setters = [call for call in asked if call.name.startswith("set_")]
    try:
        yield from layers.problems(case, target, setters, arguments.values)
    except Raised as raised:
        yield _dies(case, raised, setters[0])


def _dies(case: Case, raised: Raised, call: Call) -> Problem:
    return Problem(
        "fails",
        f"{raised.where} raises {raised.kind}: {raised.message} (called at {call.site.at(case.source)})",
        f"dies {call.stage}",
        "the model inside the wrapper lacks the interface: take another target class or a newer SGLang",
    )


def _lacks(case: Case, ref: ClassRef, name: str) -> bool:
    return not case.classes.find(ref, name) or isinstance(case.classes.find(ref, name), Undecided)


def missing_methods(case: Case, ref: ClassRef, asked: list[Call], wrapped: Wrapped) -> Iterator[Problem]:
    absent = [name for name in dict.fromkeys(call.name for call in asked) if _lacks(case, ref, name)]
    for name in absent:
        places = [call for call in asked if call.name == name]
        found = case.classes.find(ref, name)
        reason = found.reason if isinstance(found, Undecided) else wrapped.reason
        undecided = isinstance(found, Undecided) or wrapped.kind == "undecided"
        yield Problem(
            "undecided" if undecided else "fails",
            f"{ref.name} has no {name}; called at {', '.join(call.site.at(case.source) for call in places)}"
            + (f"; {reason}" if undecided else ""),
            f"dies {first_stages(places)}: AttributeError",
            remedy(case.source.name, wrapped, undecided),
            plugin="cures" if wrapped.kind == "delegate" else "",
        )


def first_stages(places: list[Call]) -> str:
    """When the first call comes; kernels are not always warmed up, so then the next one too."""
    stages = list(dict.fromkeys(call.stage for call in places))
    if not stages[0].startswith("at kernel warm-up") or len(stages) == 1:
        return stages[0]
    return f"at kernel warm-up or {stages[1]}"


def remedy(engine: str, wrapped: Wrapped, undecided: bool) -> str:
    if wrapped.kind == "delegate":
        return (
            f"{wrapped.inner} in self.{wrapped.attribute} has it: passing the calls on is enough; eyas launch does it, "
            "or eyas patch"
        )
    if undecided:
        return "start it once with eyas launch: its plugin says at the start, before the weights, whether it works"
    return f"{wrapped.reason}: a newer {engine}, another engine, or speculation in Eyas itself"


# The drafter


def drafter_problems(case: Case, contract: list[Call], arguments: Record, report: Report) -> Iterator[Problem]:
    config = case.drafter_config()
    if "model_type" not in config.values:
        nameless = architectures.no_model_type(case)
        # the checkpoint's own problems are said already, whatever the engine
        asked = case.checkpoint, case.reading, "sglang", case.source
        refused = [] if case.reading.problems else list(converting.refusals(*asked))
        yield replace(nameless, fix="no conversion helps, see below") if refused else nameless
        yield from refused
        return
    named = architecture(case, config)
    classes = find_architecture(case.classes, named)
    if not classes:
        yield architectures.unknown_drafter(case, named)
        return
    ref = classes[0]
    report.facts.append(Fact("drafter class", f"{ref.name} ({case.source.short(ref.module)}:{ref.line})"))
    yield from _drafter_interface(case, ref, contract)
    interpreter = case.interpreter(facts(case.classes) | {"speculative_draft_window_size": None})
    given = {"config": config, "quant_config": None}
    loaded = loading.load(case, ref, interpreter, given, config, _share(case))
    yield from loading.problems(case, loaded)
    yield from dtypes.problems(case, arguments.values.get("dtype", "auto"), ref)
    yield from quantization.problems(case)
    yield from _length(case)
    seen = {"vision_config", "audio_config"} & case.target.config.keys()
    if seen and "mm_input_embeds" not in case.source.text(ref.module):
        yield Problem(
            "note",
            f"{case.source.short(ref.module)} never reads mm_input_embeds: images and sounds reach the target only",
            "drafts after an image are made without it: less acceptance there, none of it on text",
            "judge acceptance on the prompts you serve",
        )


def architecture(case: Case, config: Record) -> str:
    """The drafter's architecture, as configs/model_config.py rewrites it for drafters."""
    module = case.source.module("sglang.srt.configs.model_config")
    ref = case.classes.class_in(module, "ModelConfig") if module else None
    if ref and case.classes.find(ref, "_config_draft_model"):
        known = {"is_draft_model": True, "hf_config": config, "hf_text_config": config}
        with contextlib.suppress(Raised):
            case.interpreter(facts(case.classes)).method(Instance(ref, attrs=known, ready=True), "_config_draft_model")
    named = config.values.get("architectures")
    named = named[0] if isinstance(named, list) and named else ""
    return named if isinstance(named, str) else "".join(case.reading.architectures[:1])


def _drafter_interface(case: Case, ref: ClassRef, contract: list[Call]) -> Iterator[Problem]:
    """Attributes and methods that the draft worker uses without asking first."""
    for call in contract:
        if call.side != "drafter" or call.site.asked_first:
            continue
        built = Instance(ref, [], {"config": case.drafter_config(), "quant_config": None})
        interpreter = case.interpreter(facts(case.classes))
        if interpreter.has(built, call.name) is False:
            yield Problem(
                "fails",
                f"{ref.name} has no {call.name}, used at {call.site.at(case.source)}: it is no EAGLE-3 drafter class",
                f"dies {call.stage}: AttributeError",
                'eyas convert --to sglang (architectures must be ["LlamaForCausalLMEagle3"])',
                "https://github.com/sgl-project/sglang/issues/36528",
            )
            return


def _share(case: Case) -> Any:
    """speculative/eagle_worker*.py lends the embedding, and the head where the drafter has none."""

    def share(loaded: Loaded) -> None:
        hidden, vocab = (case.target.size(key) or 0 for key in ("hidden_size", "vocab_size"))
        embed, head = (Tensor(f"the target's {name}", (vocab, hidden)) for name in ("embedding", "head"))
        borrows = truth(loaded.interpreter.get(loaded.instance, "load_lm_head_from_target", False))
        if borrows:
            loaded.interpreter.method(loaded.instance, "set_embed_and_head", embed, head)
        else:
            loaded.interpreter.method(loaded.instance, "set_embed", embed)

    return share


def _length(case: Case) -> Iterator[Problem]:
    """configs/model_config.py compares the drafter's context with the target's, and may refuse."""
    module = case.source.module("sglang.srt.configs.model_config")
    ref = case.classes.class_in(module, "ModelConfig") if module else None
    if module is None or ref is None:
        return
    lengths = case.interpreter(facts(case.classes))
    context = case.flags.get("context_length") or lengths.call(
        lengths.global_name(module, "get_context_length"), Record(dict(case.target.text))
    )
    drafter = case.drafter_config()
    known = {"is_draft_model": True, "hf_config": drafter, "hf_text_config": drafter}
    interpreter = case.interpreter(facts(case.classes))
    interpreter.believed.add(module)
    try:
        interpreter.method(Instance(ref, attrs=known, ready=True), "_derive_context_length", context)
    except Raised as raised:
        yield Problem(
            "fails",
            f"max_position_embeddings of the drafter is {drafter.values.get('max_position_embeddings')}, the target's "
            f"context is {context}; {raised.where} raises {raised.kind}",
            "dies while the drafter's config is read",
            f"raise max_position_embeddings in the drafter's config.json to {context} (RoPE has no weights), or set "
            "--context-length",
        )
