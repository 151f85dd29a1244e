"""``eyas plan``: whether it would pay, on hardware one does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eyas.cli.console import clean
from eyas.cli.eval import grid_of
from eyas.cli.options import OUTPUT, Debug, Json, numbers, refuse
from eyas.cli.records import print_json
from eyas.cli.tables import Cells, as_table, grid, page, print_markdown
from eyas.core import DraftShape

if TYPE_CHECKING:
    from eyas.bench.plan import Plan, Point
    from eyas.bench.roofline import Split
    from eyas.speculation.cost import AcceptanceRates

_machine: Callable[..., Any] = partial(typer.Option, rich_help_panel="Machine")
_load: Callable[..., Any] = partial(typer.Option, rich_help_panel="Load")
_drafts: Callable[..., Any] = partial(typer.Option, rich_help_panel="Drafts")


def plan(
    target: Annotated[
        str, typer.Argument(help="A model folder, its config.json alone, or smollm2.", show_default=False)
    ],
    *,
    hardware: Annotated[
        str,
        _machine(metavar="NAME|FILE.yaml", help="A GPU, such as h100-sxm (any other name lists them), or your own."),
    ],
    gpus: Annotated[int, _machine(help="How many of them share the target (tensor parallelism).")] = 1,
    all_reduce: Annotated[
        str | None,
        _machine(metavar="NAME", help="Only this one of the machine's all-reduces.", show_default="the fastest"),
    ] = None,
    context: Annotated[int, _load(help="Tokens in the cache of each sequence.")] = 1024,
    concurrency: Annotated[str, _load(metavar="N,N,...", help="Sequences decoded at once.")] = "1,2,4,8,16,32,64",
    quantization: Annotated[
        str | None,
        _load(metavar="FORMAT", help="Of a target whose config names none: fp8, int8, w8a16, w4a16, mxfp4, nvfp4."),
    ] = None,
    kv_cache_dtype: Annotated[Literal["auto", "fp8"], _load(help="16 bits, or 8.")] = "auto",
    drafter: Annotated[
        Path | None,
        _drafts(
            help="A drafter's folder or config.json; weights are not read. Default: one of the usual shape.",
            show_default=False,
        ),
    ] = None,
    acceptance: Annotated[
        str | None,
        _drafts(metavar="R,R,...", help="Acceptance rates by position, as eyas eval and engines report them."),
    ] = None,
    acceptance_length: Annotated[
        float | None,
        _drafts(metavar="TAU", help="Or the acceptance length of one draft shape: the rate is taken to be constant."),
    ] = None,
    steps: Annotated[str, _drafts(metavar="N,N,...", help="Depths.")] = "1,2,3,4,5,6,7,8",
    topk: Annotated[
        str | None,
        _drafts(
            metavar="N,N,...",
            help="Candidates per position; 1 is a chain.",
            show_default="1,2,4,8; with --acceptance-length 1",
        ),
    ] = None,
    draft_tokens: Annotated[
        str, _drafts(metavar="N,N,...", help="Tokens of a tree that are verified at once.")
    ] = "4,8,16,32",
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables as Markdown.", rich_help_panel=OUTPUT)] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict step times, speedup and break-even from two config files and a data sheet.

    Nothing is loaded and no GPU is needed. How far predictions were from published measurements is in docs/plan.md.

    Examples:
    eyas plan ./my-model --hardware h100-sxm --acceptance 0.75,0.65,0.6

    eyas plan ./config.json --hardware rtx-pro-6000 --gpus 8 --steps 3 --acceptance-length 2.6

    eyas plan ./my-model --drafter ./my-drafter --hardware ./our-box.yaml --concurrency 1,16,64
    """
    from eyas.bench.hardware import find_hardware
    from eyas.bench.plan import Question
    from eyas.bench.plan import plan as predict

    refuse(
        (as_json and markdown, "--json and --markdown exclude each other."),
        (
            acceptance is not None and acceptance_length is not None,
            "--acceptance and --acceptance-length say the same in two ways: give one.",
        ),
    )
    machine = find_hardware(hardware)
    shapes = tuple(grid_of(steps, topk or ("1" if acceptance_length is not None else "1,2,4,8"), draft_tokens))
    question = Question(
        target=target,
        drafter=drafter,
        hardware=machine.only(all_reduce) if all_reduce is not None else machine,
        gpus=gpus,
        context=context,
        concurrency=numbers("--concurrency", concurrency, int, above=0),
        shapes=shapes,
        rates=rates_of(acceptance, acceptance_length, shapes),
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
    )
    found = predict(question)
    if as_json:
        for record in records(found):
            print_json(record)
    else:
        show(found, markdown)


def rates_of(acceptance: str | None, length: float | None, shapes: tuple[DraftShape, ...]) -> AcceptanceRates | None:
    from eyas.bench.plan import rates_by_position, rates_of_length

    if length is not None:
        return rates_of_length(length, shapes)
    if acceptance is None:
        return None
    return rates_by_position(numbers("--acceptance", acceptance, float), max(shape.eagle_topk for shape in shapes))


# What is shown


def records(found: Plan) -> Iterator[dict[str, Any]]:
    from eyas.bench.shapes import facts

    question = found.question
    yield {
        "kind": "plan",
        "target": facts(found.target),
        "drafter": facts(found.drafter),
        "hardware": asdict(question.hardware),
        "gpus": question.gpus,
        "context": question.context,
        "break_even_concurrency": found.break_even_concurrency,
        "notes": found.notes(),
    }
    for point in found.points:
        yield {
            "kind": "point",
            "concurrency": point.concurrency,
            "shape": asdict(point.shape),
            "steps": {
                name: asdict(split) | {"total": split.total}
                for name, split in (("plain", point.plain), ("verify", point.verify), ("draft", point.draft))
            },
            "acceptance_length": point.tokens,
            "break_even_acceptance_length": point.break_even,
            "plain_tokens_per_second": point.plain_speed,
            "tokens_per_second": point.speed,
            "speedup": point.speedup,
        }


def show(found: Plan, markdown: bool) -> None:
    from rich.text import Text

    out = page()
    tables = [("Speculation", speculation_cells(found)), ("Step times, ms", step_cells(found))]
    if markdown:
        print_markdown(tables)
        print("\n".join(f"* {note}" for note in found.notes()))
        return
    out.print(grid(described(found)))
    for title, cells in tables:
        out.print(as_table(title, cells))
    out.print(grid([("verdict", Text(verdict(found), "bold"))]))
    for note in found.notes():
        out.print(Text(clean(note), "dim"))


def described(found: Plan) -> list[tuple[str, str]]:
    target, drafter, question = found.target, found.drafter, found.question
    experts = target.experts
    sizes = f"{target.parameters / 1e9:,.1f} B weights"
    if experts:
        sizes += f", {target.active / 1e9:,.1f} B for a token: {experts.chosen} of {experts.number} experts"
    sizes += f"; {target.bytes / 1e9:,.1f} GB"
    cache = target.attention.bytes_per_token / 1024
    machine = question.hardware
    peak = machine.tflops["bf16"]
    several = f"{question.gpus} x " if question.gpus > 1 else ""
    return [
        ("target", f"{target.name}: {sizes}; {target.attention.kind}, {cache:,.0f} KiB of cache a token"),
        ("drafter", f"{drafter.name}: {drafter.parameters / 1e9:,.2f} B weights, {drafter.vocabulary:,} draft tokens"),
        (
            "hardware",
            f"{several}{machine.name}: {machine.memory_gb_s:,.0f} GB/s, {peak:,.0f} TFLOP/s",
        ),
        ("context", f"{question.context:,} tokens"),
    ]


def verdict(found: Plan) -> str:
    limit = found.break_even_concurrency
    if found.points[0].pays is None:
        return "unknown without acceptance: it pays where the acceptance length is above break-even."
    if limit is None:
        return "should pay at every concurrency asked about." if all(p.pays for p in found.points) else "mixed."
    return "should not pay." if limit == found.points[0].concurrency else f"should pay below concurrency {limit}."


def speculation_cells(found: Plan) -> Cells:
    header = ["concurrency", "plain tok/s", "best draft", "break-even length", "length", "tok/s", "speedup"]
    rows = [
        [
            str(point.concurrency),
            f"{point.plain_speed:,.1f}",
            shape_name(point),
            f"{point.break_even:.2f}",
            *(
                ["-", "-", "-"]
                if point.tokens is None or point.speed is None or point.speedup is None
                else [f"{point.tokens:.2f}", f"{point.speed:,.1f}", f"{point.speedup:.2f}x"]
            ),
        ]
        for point in found.points
    ]
    return [header, *rows]


def shape_name(point: Point) -> str:
    shape = point.shape
    if shape.eagle_topk == 1:
        return f"chain {shape.num_steps}"
    return f"{shape.num_steps} x {shape.eagle_topk}, {shape.num_draft_tokens} tokens"


def step_cells(found: Plan) -> Cells:
    from eyas.bench.roofline import Split

    header = ["concurrency", "step", *(name.replace("_", "-") for name in Split.names()), "total"]
    rows = []
    for point in found.points:
        for name, split in (("plain", point.plain), ("verify", point.verify), ("draft", point.draft)):
            rows.append([str(point.concurrency) if name == "plain" else "", name, *milliseconds(split)])
    return [header, *rows]


def milliseconds(split: Split) -> list[str]:
    parts = [getattr(split, name) for name in split.names()]
    return [f"{1e3 * part:.2f}" if part else "-" for part in parts] + [f"{1e3 * split.total:.2f}"]
