"""What SGLang makes of its speculative flags: its own argument handlers and checks, run on them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from eyas.bridges.case import Case
from eyas.bridges.code.values import UNKNOWN, Raised, Record
from eyas.bridges.report import Problem
from eyas.bridges.sglang import layers
from eyas.bridges.sglang.calls import facts
from eyas.core import DraftShape

_HANDLER = re.compile(r"handle_(speculative_decoding|eagle\w*)$")
_KEPT_NONE = re.compile("^speculative_|^max_running_requests$")  # None means "not given" until the handler decides
_FAKED = "SGLANG_SIMULATE_ACC_LEN"
_BACKENDS = ("", "prefill_", "decode_")
_FIELDS = {"pipeline_parallel_size": "pp_size", "pp": "pp_size"}  # other spellings of flags that decide something here
_SHAPE = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


def resolve(case: Case) -> tuple[Record, list[Problem]]:
    """The arguments as the engine has them after its handler, and what it refuses or changes."""
    values = _defaults(case) | {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(case.checkpoint.path),
    }
    arguments = Record(values | {_FIELDS.get(name, name): value for name, value in case.flags.items()})
    problems = list(_own_rules(case))
    for module, function in _handlers(case):
        problems += _handled(case, module, function, arguments)
    problems += [*_pipeline(case, arguments), *_too_small(case, arguments)]
    return arguments, problems


def _handled(case: Case, module: str, function: ast.FunctionDef, arguments: Record) -> Iterator[Problem]:
    interpreter = case.interpreter(facts(case.classes) | {"hf_config": case.target_config()})
    interpreter.believed.add(module)
    if _number(case.environment.get(_FAKED) or "-1") is None:  # SGLang takes its default for what it cannot read
        interpreter.environment = {k: v for k, v in case.environment.items() if k != _FAKED}

    def declare(record: Record, source: str, **fields: Any) -> None:
        for name, value in fields.items():
            interpreter.set(record, name, value)

    interpreter.overrides |= {
        "resolving_view": lambda value: value,
        "resolved_view": lambda value: value,
        "declare_resolution": declare,
        "attention_backends_of": lambda record: tuple(record.get(f"{k}attention_backend") for k in _BACKENDS),
    }
    try:
        interpreter.block(module, function.body, {function.args.args[0].arg: arguments})
    except Raised as raised:
        yield Problem(
            "fails", f"{raised.where} raises {raised.kind}: {raised.message}", "dies at the start", "change the flags"
        )
    for warned in interpreter.warnings:
        yield Problem("note", f"{warned.where} will warn: {warned.message}", _means(warned.message))


def _pipeline(case: Case, arguments: Record) -> Iterator[Problem]:
    """What the engine's checks say to several pipeline stages: conditions on pp_size, with what returns before them."""
    size = arguments.values.get("pp_size")
    if type(size) is not int or size < 2:
        return
    known = Record(arguments.values | {"disable_overlap_schedule": UNKNOWN})  # stages switch it off before the checks
    for module, function in _functions(case, "pp_size", re.compile("check_")):
        for index, node in enumerate(function.body):
            owners = _owners(node.test, "pp_size") if isinstance(node, ast.If) else set()
            if not owners:
                continue
            before = [n for n in function.body[:index] if isinstance(n, ast.If) and isinstance(n.body[0], ast.Return)]
            interpreter = case.interpreter(facts(case.classes))
            interpreter.believed.add(module)
            try:
                interpreter.block(module, [*before, node], dict.fromkeys(owners, known))
            except Raised as raised:
                yield Problem(
                    "fails",
                    f"--pp-size {size}: {raised.where} raises {raised.kind}: {raised.message}",
                    "dies at the start",
                    "spread the target over the GPUs with --tp-size alone",
                )
                return


def _owners(test: ast.expr, name: str) -> set[str]:
    """The names whose attribute ``name`` a condition asks for."""
    asked = [node.value for node in ast.walk(test) if isinstance(node, ast.Attribute) and node.attr == name]
    return {owner.id for owner in asked if isinstance(owner, ast.Name)}


def _too_small(case: Case, arguments: Record) -> Iterator[Problem]:
    """Numbers that the handler let pass, and with which nothing can be drafted."""
    for name in _SHAPE:
        value = arguments.values.get(name)
        least = 2 if name == _SHAPE[2] else 1  # draft tokens: the root counts
        if type(value) is not int or value >= least:
            continue
        pauses = f"{_SHAPE[0]} == 0"  # a worker that may stop drafting for a while
        idle = name == _SHAPE[0] and value == 0 and case.source.containing([pauses], ["srt/speculative/"])[pauses]
        yield Problem(
            "silent" if idle else "fails",
            f"--{name.replace('_', '-')} is {value}",
            "nothing is ever drafted: the drafter costs memory and time for nothing"
            if idle
            else "dies at the first draft, at graph capture or in the first request: there is nothing to choose from",
            "at least 1, and for draft tokens 2 (the root counts); without these flags SGLang chooses all three",
        )
        return


def _means(message: str) -> str:
    if "max running requests" in message.lower():
        return "a server without speculation has no such cap: give both the same --max-running-requests to compare them"
    return "the engine changes what was asked for"


def _handlers(case: Case) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods that check and complete the speculative arguments."""
    return _functions(case, _SHAPE[2], _HANDLER)


def _functions(case: Case, word: str, named: re.Pattern[str]) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Those of the arguments' modules that have ``word`` in them."""
    for module in case.source.containing([word], ["srt/server_args", "srt/arg_groups/"])[word]:
        for node in case.source.tree(module).body:
            for function in node.body if isinstance(node, ast.ClassDef) else [node]:
                if isinstance(function, ast.FunctionDef) and named.search(function.name) and function.args.args:
                    yield module, function


def _defaults(case: Case) -> dict[str, Any]:
    """Fields of the arguments and their defaults; None is left out where the engine chooses a value itself."""
    source, found = case.source, dict[str, Any]()
    for module in sorted(source.modules):
        if re.fullmatch(rf"{source.name}/srt/(server_args|arg_groups/fields/\w+)\.py", module):
            for node in source.tree(module).body:
                for field in node.body if isinstance(node, ast.ClassDef) else []:
                    if (
                        isinstance(field, ast.AnnAssign)
                        and isinstance(field.target, ast.Name)
                        and isinstance(field.value, ast.Constant)
                    ):
                        name, value = field.target.id, field.value.value
                        if value is not None or _KEPT_NONE.search(name):
                            found[name] = value
    return found


def _own_rules(case: Case) -> Iterator[Problem]:
    """Rules that no handler states: they show in the tree builder, or as numbers that mean nothing."""
    given = case.flags
    if str(given.get("speculative_algorithm", "EAGLE3")).upper() != "EAGLE3":
        yield _another_algorithm(case)
    steps, topk, tokens = (given.get(name) for name in _SHAPE)
    if isinstance(steps, int) and isinstance(topk, int) and isinstance(tokens, int) and steps > 0 and topk > 0:
        most = DraftShape.most_tokens(steps, topk)
        if tokens > most:
            yield Problem(
                "fails",
                f"--speculative-num-draft-tokens {tokens}: {steps} steps with top-k {topk} make a tree of "
                f"{most} tokens at most (the root counts)",
                "dies at the first draft: more tokens are chosen than there are",
                f"ask for at most {most}",
            )
    faked = _number(case.environment.get(_FAKED) or "-1")
    if faked is None:
        yield Problem("note", f"{_FAKED}={case.environment[_FAKED]} is no number", "SGLang does as without it")
    elif faked > 0:
        yield Problem(
            "silent",
            f"{_FAKED}={case.environment[_FAKED]} is set: acceptance is made up",
            "text and speed mean nothing",
            f"unset {_FAKED}",
        )
    reduced = case.reading.config.draft_vocab_size < case.reading.config.vocab_size
    if given.get("speculative_use_rejection_sampling") and reduced:
        yield Problem(
            "fails",
            f"--speculative-use-rejection-sampling with a draft vocabulary of "
            f"{case.reading.config.draft_vocab_size} tokens: speculative/eagle_worker_v2.py wants the target's own",
            "dies after both are loaded",
            "drop the flag: the default verification works with a reduced vocabulary",
        )


def _another_algorithm(case: Case) -> Problem:
    given, fix = case.flags["speculative_algorithm"], "--speculative-algorithm EAGLE3"
    said = f"--speculative-algorithm {given}, and this is an EAGLE-3 drafter"
    if str(given).upper() not in ("EAGLE", "NEXTN"):
        return Problem("silent", said, "the drafter is not run, or not as what it was trained to be", fix)
    config, (_, where) = case.reading.config, layers.read_ids(case)
    if config.hidden_size != config.target_hidden_size:
        consequence = f"dies at the first forward: fc takes {config.num_aux} states of the target, and gets one"
        return Problem("fails", f"{said}; its layers are captured under EAGLE3 only ({where})", consequence, fix)
    return Problem(
        "silent",
        f"{said}; its layers are captured under EAGLE3 only ({where})",
        "the drafter gets the target's last state alone, as wide as its own, and skips fc: acceptance is near zero, "
        "nothing in the log says why",
        fix,
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
