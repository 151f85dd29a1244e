"""``eyas eval``: how well a drafter guesses, and what other draft shapes would bring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli.console import notice, progress
from eyas.cli.options import (
    OUTPUT,
    Debug,
    EngineFlags,
    Json,
    LoadingFlags,
    ShapeFlags,
    Target,
    numbers,
    refuse,
    spread,
)
from eyas.cli.records import print_json
from eyas.cli.tables import Cells, as_table, page, print_markdown
from eyas.core import DraftShape, SamplingParams, UsageError

if TYPE_CHECKING:
    from eyas.engine.llm import LLM
    from eyas.training.evaluation import Checked, Evaluator, Measured, Prompts
    from eyas.training.simulate import Simulated

SMALLEST = 2  # tokens: the context of an engine that only loads the pair
_simulation: Callable[..., Any] = partial(typer.Option, rich_help_panel="Simulation of other draft shapes")


@spread
def evaluate(
    target: Target,
    drafter: Annotated[
        str | None,
        typer.Argument(
            help="A drafter's folder or weights file, or untrained. Default: the one that comes with Eyas.",
            show_default=False,
        ),
    ] = None,
    *,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="JSON lines with a prompt, messages or a ShareGPT conversation; each file is a task (repeatable). "
            "Default: built-in ones.",
            show_default=False,
        ),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(metavar="chat|code|maths", help="Only these of the built-in prompts (repeatable)."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", help="At most N prompts of each task.", show_default="all")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 128,
    temperature: Annotated[
        str, typer.Option(metavar="T,T,...", help="Of the answers, one after the other; 0 is greedy.")
    ] = "0,1",
    seed: Annotated[int, typer.Option(help="Of answers that are sampled: the n-th prompt has seed + n.")] = 0,
    no_simulate: Annotated[bool, _simulation("--no-simulate", help="Measure only.")] = False,
    steps: Annotated[str, _simulation(metavar="N,N,...", help="Depths.")] = "1,2,3,4,5,6,7,8",
    topk: Annotated[str, _simulation(metavar="N,N,...", help="Candidates per position; 1 is a chain.")] = "1,2,4,8",
    draft_tokens: Annotated[
        str,
        _simulation(metavar="N,N,...", help="Tokens of a tree that are verified at once."),
    ] = "4,8,16,32",
    check: Annotated[int, _simulation(metavar="N", help="Run N of these shapes for real too.")] = 0,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Tables as Markdown, for a model card.", rich_help_panel=OUTPUT)
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
    shape: ShapeFlags,
    loading: LoadingFlags,
) -> None:
    """Measure acceptance by really decoding: by position, by task, greedy and sampled.

    The draft shape is a chain of 5 unless you say otherwise. What other shapes would have come to follows from one pass
    over the same answers: chains exactly, trees closely.

    Examples:
    eyas eval smollm2 ./my-drafter

    eyas eval ./my-model ./my-drafter --prompts chats.jsonl --temperature 0 --speculative-num-steps 3

    eyas eval smollm2 ./my-drafter --topk 1,4 --check 3
    """
    temperatures = numbers("--temperature", temperature, float)
    samplings = [SamplingParams(temperature=t, seed=seed, max_tokens=max_tokens) for t in temperatures]
    drawn = shape.shape() or DraftShape()
    shapes = grid_of(steps, topk, draft_tokens) if not no_simulate else []
    refuse(
        (limit is not None and limit < 1, f"--limit must be at least 1, got {limit}."),
        (check < 0, f"--check must be at least 0, got {check}."),
        (check and no_simulate, "--check compares real runs with the simulation: it excludes --no-simulate."),
        (prompts and task, "--task chooses among the built-in prompts: it excludes --prompts."),
        (as_json and markdown, "--json and --markdown exclude each other."),
    )
    evaluator = prepare(target, choose_drafter(target, drafter), prompts, task, limit, loading, debug)
    with progress("measuring") as report:
        evaluator = replace(evaluator, report=report)
        results = [evaluator.measure(drawn, sampling) for sampling in samplings]
        measured = [row for rows, _ in results for row in rows]
        simulated = evaluator.simulate(results[0][1], shapes) if shapes else []
        checked = evaluator.check(simulated, check, samplings[0]) if check else []
    if as_json:
        for record in records(measured, simulated, checked, samplings[0]):
            print_json(record)
    else:
        show(measured, simulated, checked, samplings[0], markdown)


def prepare(
    target: str,
    drafter: str,
    files: Sequence[Path] | None,
    tasks: Sequence[str] | None,
    limit: int | None,
    loading: LoadingFlags,
    debug: bool,
) -> Evaluator:
    """The pair loaded, without an engine that holds memory of its own, and the prompts as it reads them."""
    llm = replace(loading, context_length=SMALLEST).load(
        target, drafter, None, EngineFlags(speculation="off"), debug=debug
    )
    from eyas.drafter.eagle3 import Eagle3Drafter
    from eyas.training.evaluation import Evaluator

    assert isinstance(llm.drafter, Eagle3Drafter)
    found = read_prompts(llm, files, tasks, limit)
    for why, count in found.left_out.items():
        notice(f"prompts left out: {count}, {why}.")
    return Evaluator(llm.target, llm.drafter, found.by_task, llm.engine.eos_ids)


def read_prompts(llm: LLM, files: Sequence[Path] | None, tasks: Sequence[str] | None, limit: int | None) -> Prompts:
    from eyas.training.evaluation import builtin_prompts, prompts_of

    return prompts_of(llm, files, limit) if files else builtin_prompts(llm, tasks or (), limit)


def choose_drafter(target: str, asked: str | None, how: str = "behind it") -> str:
    """The drafter asked for, else the one that comes with Eyas; ``how`` one is named where there is none."""
    from eyas.drafter.shipped import shipped_drafter

    if asked is not None:
        return asked
    if shipped := shipped_drafter(target):
        return str(shipped)
    raise UsageError(f"no drafter comes with Eyas for {target}: name one {how}.")


def grid_of(steps: str, topk: str, draft_tokens: str) -> list[DraftShape]:
    from eyas.speculation.cost import grid

    named = {"--steps": steps, "--topk": topk, "--draft-tokens": draft_tokens}
    shapes = grid(*(numbers(flag, text, int, above=0) for flag, text in named.items()))
    if not shapes:
        raise UsageError("--steps, --topk and --draft-tokens leave no draft shape: --draft-tokens counts the root.")
    return shapes


# What is shown


def records(
    measured: Sequence[Measured], simulated: Sequence[Simulated], checked: Sequence[Checked], first: SamplingParams
) -> Iterator[dict[str, Any]]:
    for row in measured:
        facts = asdict(row)
        del facts["stats"]
        yield {"kind": "measured"} | facts | numbers_of(row.stats)
    for found in simulated:
        yield {
            "kind": "simulated",
            "temperature": first.temperature,
            "shape": asdict(found.shape),
            "expected_tokens": found.expected_tokens,
            "rates": asdict(found.rates),
        } | numbers_of(found.stats)
    for both in checked:
        yield {
            "kind": "checked",
            "temperature": first.temperature,
            "shape": asdict(both.simulated.shape),
            "simulated": both.simulated.acceptance_length,
            "real": both.real.acceptance_length,
            "off": both.off,
        }


def numbers_of(stats: Any) -> dict[str, Any]:
    names = ("acceptance_length", "acceptance_rates", "steps", "drafted", "emitted")
    return {name: getattr(stats, name) for name in names}


def show(
    measured: Sequence[Measured],
    simulated: Sequence[Simulated],
    checked: Sequence[Checked],
    first: SamplingParams,
    markdown: bool,
) -> None:
    how = "greedy" if first.greedy else f"temperature {first.temperature:g}"
    tables = [("Acceptance, measured", measured_cells(measured))]
    if simulated:
        tables.append((f"Acceptance length of other draft shapes by steps, simulated ({how})", grid_cells(simulated)))
    if checked:
        tables.append((f"The simulation against real runs ({how})", checked_cells(checked)))
    if markdown:
        return print_markdown(tables)
    for title, cells in tables:
        page().print(as_table(title, cells))


def measured_cells(measured: Sequence[Measured]) -> Cells:
    header = ["task", "temperature", "acceptance length", "95% interval", "rates by position", "prompts"]
    rows = [
        [
            row.task,
            f"{row.temperature:g}",
            f"{row.stats.acceptance_length:.2f}",
            "{:.2f} to {:.2f}".format(*row.interval),
            " ".join(f"{rate:.2f}" for rate in row.stats.acceptance_rates),
            str(row.prompts),
        ]
        for row in measured
    ]
    return [header, *rows]


def grid_cells(simulated: Sequence[Simulated]) -> Cells:
    """A column for each number of steps, a row for each of chain and trees."""
    depths = sorted({found.shape.num_steps for found in simulated})
    rows: dict[str, dict[int, str]] = {}
    for found in simulated:
        shape = found.shape
        name = "chain" if shape.eagle_topk == 1 else f"top-k {shape.eagle_topk}, {shape.num_draft_tokens} tokens"
        rows.setdefault(name, {})[shape.num_steps] = f"{found.acceptance_length:.2f}"
    cells = [[name, *(row.get(depth, "-") for depth in depths)] for name, row in rows.items()]
    return [["", *map(str, depths)], *cells]


def checked_cells(checked: Sequence[Checked]) -> Cells:
    rows = []
    for both in checked:
        shape, simulated = both.simulated.shape, both.simulated.acceptance_length
        sizes = [str(n) for n in (shape.num_steps, shape.eagle_topk, shape.num_draft_tokens)]
        rows.append([*sizes, f"{simulated:.3f}", f"{both.real.acceptance_length:.3f}", f"{both.off:+.1%}"])
    return [["steps", "top-k", "draft tokens", "simulated", "real", "off"], *rows]
