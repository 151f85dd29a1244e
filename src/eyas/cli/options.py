"""Flags that several verbs share, in groups: one typed field is one flag and one line of help."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from eyas.core import DraftShape, SamplingParams, UsageError

if TYPE_CHECKING:
    from eyas.engine.llm import LLM

OUTPUT = "Output"
TREE_TOKENS = 8  # with 5 steps and top-k 4, what SGLang takes by default for Llama
_sampling: Callable[..., Any] = partial(typer.Option, rich_help_panel="Sampling")
_shape: Callable[..., Any] = partial(typer.Option, rich_help_panel="Draft shape, in SGLang's names", show_default=False)
_engine: Callable[..., Any] = partial(typer.Option, rich_help_panel="Engine")
_loading: Callable[..., Any] = partial(typer.Option, rich_help_panel="Loading")

Target = Annotated[
    str, typer.Argument(help="A model folder, a Hugging Face id, a GGUF file, or smollm2.", show_default=False)
]
EnginePython = Annotated[
    Path | None,
    typer.Option(help="The engine's environment, or its Python. Default: where Eyas itself is installed."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks, and what the libraries underneath say.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line, for machines.", rich_help_panel=OUTPUT)]


@dataclass(frozen=True)
class SamplingFlags:
    max_tokens: Annotated[
        int | None, _sampling(help="Longest answer. Default: 256, or 64 for the built-in prompts.", show_default=False)
    ] = None
    temperature: Annotated[float, _sampling(help="0 takes the likeliest token.")] = 0.0
    top_k: Annotated[int, _sampling(help="Only the k likeliest tokens; 0 is off.")] = 0
    top_p: Annotated[float, _sampling(help="Only the likeliest tokens that make up p.")] = 1.0
    min_p: Annotated[float, _sampling(help="Only tokens at least p times as likely as the likeliest.")] = 0.0
    repetition_penalty: Annotated[float, _sampling(help="Above 1: less of what is in prompt or answer.")] = 1.0
    presence_penalty: Annotated[float, _sampling(help="Above 0: less of what is in the answer.")] = 0.0
    frequency_penalty: Annotated[float, _sampling(help="Above 0: the less, the oftener it is in the answer.")] = 0.0
    seed: Annotated[
        int | None,
        _sampling(
            help="Same seed, same text, with and without speculation (but for near-ties below float32).",
            show_default="random",
        ),
    ] = None
    stop: Annotated[list[str] | None, _sampling(metavar="TEXT", help="End before this text (repeatable).")] = None
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", help="Go on after the end of the answer.")] = False
    logprobs: Annotated[
        int | None, _sampling(metavar="N", help="In --json: log-probabilities of each token and of the N likeliest.")
    ] = None

    def params(self, default_tokens: int) -> SamplingParams:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given["max_tokens"] = default_tokens if self.max_tokens is None else self.max_tokens
        given["stop"] = tuple(self.stop or ())
        if self.seed is None:
            del given["seed"]
        return SamplingParams(**given)


@dataclass(frozen=True)
class ShapeFlags:
    speculative_num_steps: Annotated[int | None, _shape(help="How deep to draft. Default: 5.")] = None
    speculative_eagle_topk: Annotated[
        int | None, _shape(help="Candidates per position; 1 is a chain, more are a tree. Default: 1.")
    ] = None
    speculative_num_draft_tokens: Annotated[
        int | None,
        _shape(
            help="Tokens verified at once, the last emitted one included. Default: steps + 1, for a tree 8 or more."
        ),
    ] = None

    def shape(self) -> DraftShape | None:
        """The shape with these numbers, sensible ones in place of those not given; None where none is given."""
        steps, topk = self.speculative_num_steps, self.speculative_eagle_topk
        tokens = self.speculative_num_draft_tokens
        if steps is topk is tokens is None:
            return None
        k = 1 if topk is None else topk
        if steps is None:
            steps = DraftShape.num_steps
            if tokens is not None:  # as deep as they reach in a chain; a tree spends some of them on its width
                steps = max(1, tokens - 1 if k == 1 else min(steps, tokens - 1))
        if tokens is None:
            tokens = steps + 1 if k == 1 else min(max(steps + 1, TREE_TOKENS), DraftShape.most_tokens(steps, k))
        return DraftShape(steps, k, tokens)


@dataclass(frozen=True)
class EngineFlags:
    speculation: Annotated[
        str | None,
        _engine(
            metavar="off|fixed|auto",
            help="fixed drafts as the draft shape says, auto as much as pays.",
            show_default="auto; fixed with a draft shape or --compare",
        ),
    ] = None
    kv_cache_gib: Annotated[
        float | None,
        _engine(help="Memory for keys and values, in GiB.", show_default="a quarter of what is free, <= 4"),
    ] = None
    mem_fraction_static: Annotated[
        float | None,
        _engine(help="On a GPU instead: the part of it for weights, keys and values.", show_default="0.85"),
    ] = None
    chunked_prefill_size: Annotated[
        int | None, _engine(help="Prompt tokens read in one step.", show_default="256; on a GPU 2048")
    ] = None
    enable_torch_compile: Annotated[
        bool,
        _engine("--enable-torch-compile", help="Compile the steps first: minutes the first time, seconds each later."),
    ] = False

    def serving(self, shape: DraftShape | None, compare: bool) -> dict[str, Any]:
        """What ``eyas.engine.llm.load`` takes of this."""
        from eyas.engine.memory import Memory

        chosen = self.speculation or ("fixed" if shape or compare else "auto")
        piece = self.chunked_prefill_size
        refuse(
            (chosen not in ("off", "fixed", "auto"), f"--speculation is off, fixed or auto, got {chosen!r}."),
            (piece is not None and piece < 1, "--chunked-prefill-size must be at least 1."),
        )
        given = {"mem_fraction_static": self.mem_fraction_static, "kv_cache_gib": self.kv_cache_gib}
        memory = Memory(**{name: value for name, value in given.items() if value is not None})
        return {"speculation": chosen, "chunked_prefill_size": piece, "memory": memory}


@dataclass(frozen=True)
class LoadingFlags:
    dtype: Annotated[str, _loading(help="auto, float32, bfloat16 or float16.")] = "auto"
    device: Annotated[str | None, _loading(help="cpu, cuda, cuda:1, ...", show_default="a GPU if there is one")] = None
    context_length: Annotated[
        int | None,
        _loading(help="Longest prompt and answer together.", show_default="the target's, at most 8192"),
    ] = None
    trust_remote_code: Annotated[
        bool, _loading("--trust-remote-code", help="Run Python code that comes with the target.")
    ] = False
    attn_implementation: Annotated[
        str | None, _loading(help="sdpa, eager, ... as transformers calls them.", show_default="the model's own")
    ] = None
    drafter_layer_ids: Annotated[
        str | None,
        _loading(
            help="Entry ids such as 2,15,27 to feed the drafter instead of its checkpoint's, where these are wrong.",
            show_default="the checkpoint's",
        ),
    ] = None

    @property
    def layer_ids(self) -> tuple[int, ...] | None:
        if self.drafter_layer_ids is None:
            return None
        return numbers("--drafter-layer-ids", self.drafter_layer_ids, int)

    def load(
        self,
        target: str,
        drafter: str | None,
        shape: DraftShape | None,
        engine: EngineFlags,
        *,
        compare: bool = False,
        debug: bool,
    ) -> LLM:
        from eyas.cli.console import progress, quiet_libraries
        from eyas.drafter.inspect import check_drafter
        from eyas.target.smollm2 import smollm2_folder

        layer_ids = self.layer_ids
        if drafter not in (None, "untrained"):
            check_drafter(drafter)  # before torch, which takes seconds to import
        with progress(f"loading {target}") as report:
            if not debug:
                quiet_libraries()
            if target == "smollm2":
                smollm2_folder(report)  # fetched the first time
                report(f"loading {target}", None)
            from eyas.engine.llm import load

            given = {field.name: getattr(self, field.name) for field in fields(self)}
            given |= {"drafter_layer_ids": layer_ids, **engine.serving(shape, compare)}
            llm = load(target, drafter, shape=shape, **given)
            if engine.enable_torch_compile:
                llm.engine.compile(report)
            return llm


Number = TypeVar("Number", int, float)


def numbers(flag: str, text: str, kind: type[Number], above: float = -math.inf) -> tuple[Number, ...]:
    """What stands between commas. Raises UsageError for anything else."""
    try:
        found = tuple(kind(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(number > above for number in found):
        what = "numbers" if above == -math.inf else f"{'whole ' if kind is int else ''}numbers above {above:g}"
        raise UsageError(f"{flag} takes {what} with commas between them, got {text!r}.")
    return found


def spread(verb: Callable[..., None]) -> Callable[..., None]:
    """``verb`` as typer takes it: each parameter that is a group of flags replaced by the group's fields."""
    parameters, groups = [], dict[str, Any]()
    for parameter in inspect.signature(verb, eval_str=True).parameters.values():
        if not is_dataclass(group := parameter.annotation):
            parameters.append(parameter)
            continue
        groups[parameter.name] = group
        hints = get_type_hints(group, include_extras=True)
        parameters += [
            inspect.Parameter(field.name, parameter.kind, default=field.default, annotation=hints[field.name])
            for field in fields(group)
        ]

    def command(**values: Any) -> None:
        made = {name: group(**{f.name: values.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        verb(**values, **made)

    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def refuse(*conflicts: tuple[object, str]) -> None:
    """Raises UsageError for the first conflict that applies."""
    for applies, message in conflicts:
        if applies:
            raise UsageError(message)
