"""What SGLang makes of its speculative flags: its own argument handler, run on them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from eyas.bridges.case import Case
from eyas.bridges.code.values import Raised, Record
from eyas.bridges.report import Problem
from eyas.bridges.sglang.calls import facts
from eyas.core import DraftShape

_HANDLER = re.compile(r"handle_(speculative_decoding|eagle\w*)$")
_KEPT_NONE = re.compile("^speculative_|^max_running_requests$")  # None means "not given" until the handler decides
_FAKED = "SGLANG_SIMULATE_ACC_LEN"
_BACKENDS = ("", "prefill_", "decode_")


def resolve(case: Case) -> tuple[Record, list[Problem]]:
    """The arguments as the engine has them after its handler, and what it refuses or changes."""
    values = _defaults(case) | {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(case.checkpoint.path),
    }
    arguments = Record(values | dict(case.flags))
    problems = list(_own_rules(case))
    for module, function in _handlers(case):
        problems += _handled(case, module, function, arguments)
    return arguments, problems


def _handled(case: Case, module: str, function: ast.FunctionDef, arguments: Record) -> Iterator[Problem]:
    interpreter = case.interpreter(facts(case.classes) | {"hf_config": case.target_config()})
    interpreter.believed.add(module)

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


def _means(message: str) -> str:
    if "max running requests" in message.lower():
        return "a server without speculation has no such cap: give both the same --max-running-requests to compare them"
    return "the engine changes what was asked for"


def _handlers(case: Case) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods that check and complete the speculative arguments."""
    word = "speculative_num_draft_tokens"
    for module in case.source.containing([word], ["srt/server_args", "srt/arg_groups/"])[word]:
        for node in case.source.tree(module).body:
            for function in node.body if isinstance(node, ast.ClassDef) else [node]:
                if isinstance(function, ast.FunctionDef) and _HANDLER.search(function.name) and function.args.args:
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
    steps, topk, tokens = (given.get(f"speculative_{k}") for k in ("num_steps", "eagle_topk", "num_draft_tokens"))
    if isinstance(steps, int) and isinstance(topk, int) and isinstance(tokens, int):
        most = DraftShape.most_tokens(steps, topk)
        if tokens > most:
            yield Problem(
                "fails",
                f"--speculative-num-draft-tokens {tokens}: {steps} steps with top-k {topk} make a tree of "
                f"{most} tokens at most (the root counts)",
                "dies at the first draft: more tokens are chosen than there are",
                f"ask for at most {most}",
            )
    if float(case.environment.get(_FAKED) or -1) > 0:
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
