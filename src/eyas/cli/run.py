"""``eyas run``: an answer, a comparison or a conversation, decoded with speculation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eyas.cli.console import notice, progress
from eyas.cli.options import OUTPUT, Debug, EngineFlags, Json, LoadingFlags, SamplingFlags, ShapeFlags, refuse, spread
from eyas.cli.prompts import DEMO, DEMO_TOKENS, Asking, read_prompt, stdin_is_terminal
from eyas.core import SamplingParams

if TYPE_CHECKING:
    from eyas.cli.printer import Printer
    from eyas.engine.llm import LLM
    from eyas.engine.lossless import Comparison

WARM_UP_TOKENS = 64  # memory that is touched for the first time is slow on virtual machines
SPARE_SECONDS = 4.0  # of all prompts together, for comparing more than once


@spread
def run(
    target: Annotated[
        str, typer.Argument(help="A model folder, a Hugging Face id, a GGUF file, or smollm2.", show_default=False)
    ],
    prompt: Annotated[
        str | None, typer.Argument(help="What to answer; - reads stdin, as does a pipe.", show_default=False)
    ] = None,
    *,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="A drafter's folder or weights file, untrained (random weights), or none. "
            "Default: the one that comes with Eyas for this target.",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Also decode plainly: are the tokens the same, and how much faster is it? "
            "Without PROMPT on a few built-in ones.",
        ),
    ] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Talk. The default on a terminal without PROMPT.")] = False,
    no_speculation: Annotated[bool, typer.Option("--no-speculation", help="Decode plainly.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without chat template.")] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    image: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Show the target a picture (repeatable).")
    ] = None,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Tint the draft tokens that were accepted.", rich_help_panel=OUTPUT)
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
    sampling: SamplingFlags,
    shape: ShapeFlags,
    engine: EngineFlags,
    loading: LoadingFlags,
) -> None:
    """Decode with speculation, and see what it brings. The answer goes to stdout, all else to stderr.

    Examples:

    eyas run smollm2 "Why do falcons dive?"

    eyas run smollm2 --compare

    eyas run smollm2 --chat --show-drafts

    eyas run ./target --drafter ./drafter - < prompt.txt > answer.txt
    """
    no_speculation = no_speculation or engine.speculation == "off"
    talk = chat or (prompt is None and not compare and stdin_is_terminal())
    refuse(
        (chat and compare, "--chat and --compare exclude each other."),
        (compare and (no_speculation or drafter == "none"), "--compare needs speculation to compare with."),
        (compare and image and prompt is None, "--compare with --image needs a PROMPT."),
        (raw and talk, "--raw needs a PROMPT, and cannot be a conversation."),
        (raw and (system is not None or image), "--raw sends no messages: it excludes --system and --image."),
        (sampling.logprobs is not None and not as_json, "--logprobs shows in --json only: add it."),
    )
    builtin = compare and prompt is None
    params, draft = sampling.params(default_tokens=DEMO_TOKENS if builtin else 256), shape.shape()
    asking = Asking(raw, system, open_images(image or ()))
    if builtin:
        texts: Sequence[str] = DEMO
    else:
        texts = [] if talk and prompt is None else [read_prompt(prompt, raw=raw)]
    chosen = choose_drafter(target, "none" if no_speculation and drafter is None else drafter, compare)
    llm = loading.load(target, chosen, draft, engine, compare=compare, debug=debug)
    printer = make_printer(llm, as_json, show_drafts, brief=talk)
    if talk:
        from eyas.cli.chat import Chat

        Chat(llm, printer, params, asking, speculate=not no_speculation).run(texts)
    elif not compare:
        answer(llm, printer, params, asking, texts[0], speculate=not no_speculation)
    elif not compare_all(llm, printer, params, asking, texts):
        raise typer.Exit(1)


def open_images(files: Sequence[Path]) -> list:
    from eyas.target.images import open_image

    return [open_image(file) for file in files]


def choose_drafter(target: str, asked: str | None, compare: bool) -> str | None:
    """The drafter asked for, else the shipped one; where there is none, says so and what happens instead."""
    from eyas.drafter.shipped import shipped_drafter

    if asked is not None:
        return None if asked == "none" else asked
    if shipped := shipped_drafter(target):
        return str(shipped)
    if compare:
        notice(
            f"no trained drafter is there yet for {target}: an untrained one stands in, whose guesses are as good as "
            "none. This shows that the tokens stay the same, not how fast it gets."
        )
        return "untrained"
    notice(f"no trained drafter is there yet for {target}: decoding plainly. --drafter names one.")
    return None


def make_printer(llm: LLM, as_json: bool, show_drafts: bool, brief: bool) -> Printer:
    if as_json:
        from eyas.cli.records import JsonLines

        return JsonLines()
    from eyas.cli.render import Terminal

    return Terminal(llm, show_drafts, brief)


def answer(llm: LLM, printer: Printer, params: SamplingParams, asking: Asking, text: str, *, speculate: bool) -> None:
    request = llm.request(asking.prompt(llm, text), params, speculate=speculate)
    with printer.following(request) as listen:
        completion = llm.complete(request, listen)
    printer.answer(text, request, completion)


def compare_all(llm: LLM, printer: Printer, params: SamplingParams, asking: Asking, texts: Sequence[str]) -> bool:
    """Compares on every text, and says whether all differences are near-ties."""
    from eyas.engine.lossless import Comparer

    comparer, results = Comparer(llm), []
    prompts = [asking.prompt(llm, text) for text in texts]
    with progress("warming up"):
        comparer.compare(prompts[0], replace(params, max_tokens=min(WARM_UP_TOKENS, params.max_tokens)))
    for number, (text, prompt) in enumerate(zip(texts, prompts, strict=True), start=1):
        with progress(f"prompt {number} of {len(texts)}, with and without speculation"):
            once = partial(comparer.compare, prompt, params)
            results.append(compare_often(once, number % 2 == 0, SPARE_SECONDS / len(texts)))
        printer.comparison((number, len(texts)), text, results[-1])
    printer.total(texts, results)
    return all(result.lossless for result in results)


def compare_often(once: Callable[..., Comparison], speculative_first: bool, spare: float) -> Comparison:
    """Compares once or, if two more take no longer than ``spare`` seconds, three times: the one of median speedup.

    Each way is first in turn. A difference that is no near-tie is not lost among the others.
    """
    begin = time.perf_counter()
    found = [once(speculative_first=speculative_first)]
    if found[0].lossless and 2 * (time.perf_counter() - begin) <= spare:
        found += [once(speculative_first=first) for first in (not speculative_first, speculative_first)]
    wrong = next((comparison for comparison in found if not comparison.lossless), None)
    return wrong or sorted(found, key=lambda comparison: comparison.speedup)[len(found) // 2]
