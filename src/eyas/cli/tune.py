"""``eyas tune``: how much to draft at which concurrency, and with which flags of the engine."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eyas.cli.bench import TARGET, LaunchedFlags, LoadFlags, check_installed, levels_of, most_running
from eyas.cli.console import INTERRUPTED, clean, console, notice, progress
from eyas.cli.eval import SMALLEST, choose_drafter, grid_of
from eyas.cli.options import OUTPUT, Debug, EngineFlags, Json, LoadingFlags, refuse, spread
from eyas.cli.records import print_json
from eyas.cli.tables import Cells, as_table
from eyas.core import DraftShape, SamplingParams

if TYPE_CHECKING:
    from eyas.bench.subjects import Subject
    from eyas.bench.tune import Search
    from eyas.bench.workload import Workload
    from eyas.engine.llm import LLM

WIDTH = 120
JOURNAL, RESULTS = "journal.jsonl", "tune.json"
_grid: Callable[..., Any] = partial(typer.Option, rich_help_panel="What is tried")
_load: Callable[..., Any] = partial(typer.Option, rich_help_panel="Load")
_launched: Callable[..., Any] = partial(typer.Option, rich_help_panel="An engine that is launched", show_default=False)
_output: Callable[..., Any] = partial(typer.Option, rich_help_panel=OUTPUT)


@spread
def tune(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help=TARGET, show_default=False)],
    *,
    drafter: Annotated[
        str | None, typer.Option(help="Its folder or weights file. Default: the one that comes with Eyas.")
    ] = None,
    launched: LaunchedFlags,
    vary: Annotated[
        list[str] | None,
        _launched(
            metavar="'--FLAG=A,B'",
            help="Try values of a flag of the engine, nothing between commas being no flag, and on a flag without a "
            r"value; a comma within a value is \, (repeatable).",
        ),
    ] = None,
    vary_env: Annotated[
        list[str] | None, _launched(metavar="NAME=A,B", help="The same for a variable (repeatable).")
    ] = None,
    concurrency: Annotated[str, _load(metavar="N,N,...", help="Requests kept running.")] = "1,8,32",
    rounds: Annotated[int, _load(help="Of those that are left; at least 6 for a verdict.")] = 6,
    load: LoadFlags,
    steps: Annotated[str, _grid(metavar="N,N,...", help="Depths.")] = "1,2,3,4,5,6,8",
    topk: Annotated[
        str | None, _grid(metavar="N,N,...", help="Candidates per position; 1 is a chain.", show_default="1,4; vLLM 1")
    ] = None,
    draft_tokens: Annotated[str, _grid(metavar="N,N,...", help="Tokens of a tree that are verified at once.")] = "8,16",
    finalists: Annotated[int, _grid(help="Draft shapes of each concurrency that are run.")] = 2,
    out: Annotated[Path | None, _output(metavar="FOLDER", help="Results, journal and files to use.")] = None,
    resume: Annotated[bool, _output("--resume", help="Go on with --out, which broke off.")] = False,
    as_json: Json = False,
    debug: Debug = False,
    embedded: EngineFlags,
    loading: LoadingFlags,
) -> None:
    """Find how much to draft at which concurrency: predicted for all shapes, run for the most promising ones.

    Drafting nothing always takes part, and may win. Exit code: 0 drafting pays at every concurrency, 4 at one it does
    not, 3 not shown, 1 failed.

    Examples:
    eyas tune smollm2 --concurrency 1,8,32

    eyas tune ./my-model --drafter ./my-drafter --engine vllm -- --max-model-len 4096

    eyas tune ./my-model --drafter ./my-drafter --engine sglang --vary '--attention-backend=triton,flashinfer'
    """
    from eyas.bench import journal

    engine = launched.engine
    widths = topk or ("1" if engine == "vllm" else "1,4")
    refuse(
        *launched.conflicts(target, context.args, embedded, loading),
        (engine == "local" and (vary or vary_env), "--vary and --vary-env relaunch an engine: they are for --engine."),
        (engine == "vllm" and widths != "1", "vLLM drafts chains only: leave out --topk."),
        *load.conflicts(rounds),
        (finalists < 1, f"--finalists must be at least 1, got {finalists}."),
        (resume and out is None, "--resume goes on with a folder: name it with --out."),
        (embedded.speculation is not None, "--speculation is what is found out: leave it out."),
    )
    check_installed()
    from eyas.bench.grid import variants
    from eyas.bench.pairing import Plan
    from eyas.bench.tune import Search

    sampling, levels = load.sampling(), levels_of(concurrency, None)
    shapes, tried = tuple(grid_of(steps, widths, draft_tokens)), tuple(variants(vary or (), vary_env or ()))
    plan = Plan(levels, sampling, rounds, load.num_prompts, load.warmup)
    search = Search(shapes, tried, plan, finalists, engine == "local")
    chosen = choose_drafter(target, drafter, "with --drafter")
    workload = load.workload()
    folder = out or Path(f"eyas-tune-{datetime.now():%Y%m%d-%H%M%S}")
    journal.check(folder / JOURNAL, resume)  # before anything is loaded
    if engine != "local":
        from eyas.bench.subjects import Relaunched

        asked = launched.asked(target, chosen, context.args)
        subject: Subject = Relaunched(asked, sampling, most_running(levels), folder / "engine.log")
    else:
        subject = in_process(target, chosen, sampling, shapes, most_running(levels), embedded, loading, debug)
    settings = settings_of(target, chosen, launched, context.args, embedded, loading, search, workload)
    found = run(subject, workload, search, settings, folder, resume)
    made: dict[str, Any] = {"kind": "eyas tune", "format": 1, "settings": settings, **found}
    write(made, folder)
    show(made, folder, as_json)
    if code := made["verdict"]["exit_code"]:
        raise typer.Exit(code)


def settings_of(
    target: str,
    drafter: str,
    launched: LaunchedFlags,
    arguments: Sequence[str],
    engine: EngineFlags,
    loading: LoadingFlags,
    search: Search,
    workload: Workload,
) -> dict[str, Any]:
    """What a search that is resumed must have in common with its beginning."""
    from eyas.bench.provenance import no_secrets
    from eyas.bench.sides import hashed

    return {
        "target": target,
        "drafter": hashed(drafter),
        "engine": launched.engine,
        "engine_python": str(launched.engine_python),
        "flags": no_secrets(arguments),
        "loading": asdict(loading),
        "embedded_engine": asdict(engine),
        "grid": [vars(shape) for shape in search.shapes],
        "variants": list(map(str, search.variants)),
        "finalists": search.keep,
        "prompts_digest": workload.digest,
        **search.plan.lasting(),
    }


def in_process(
    target: str,
    drafter: str,
    sampling: SamplingParams,
    shapes: Sequence[DraftShape],
    running: int,
    engine: EngineFlags,
    loading: LoadingFlags,
    debug: bool,
) -> Subject:
    """The pair loaded, without memory; the engine that is tuned is made of it once acceptance is known."""
    from eyas.bench.grid import room_for
    from eyas.bench.subjects import InProcess

    small = replace(loading, context_length=SMALLEST)
    pair = small.load(target, drafter, None, EngineFlags(speculation="off"), debug=debug)
    most = pair.engine.scheduler.max_running
    refuse((running > most, f"--concurrency: the embedded engine runs {most} requests at a time, not {running}."))

    def make(pair: LLM) -> LLM:
        from eyas.engine.llm import LLM

        made = LLM(
            pair.target,
            pair.tokenizer,
            drafter=pair.drafter,
            shape=room_for(shapes),
            context_length=loading.context_length,
            name=pair.name,
            **engine.serving(None, False),
        )
        if engine.enable_torch_compile:
            with progress("compiling") as report:
                made.engine.compile(report)
        return made

    return InProcess(pair, make, drafter, sampling)


def run(
    subject: Subject, workload: Workload, search: Search, settings: Mapping[str, Any], folder: Path, resume: bool
) -> dict[str, Any]:
    import asyncio

    from eyas.bench.journal import Memo
    from eyas.bench.passes import BenchError
    from eyas.bench.provenance import provenance
    from eyas.bench.tune import tune as find

    memo = Memo(folder / JOURNAL, settings, resume=resume)
    try:
        with progress("tuning") as report:
            found = asyncio.run(find(subject, workload, search, memo, lambda what: report(what, None)))
    except KeyboardInterrupt:
        notice(f"what was measured is kept: --resume --out {folder} goes on.")
        raise typer.Exit(INTERRUPTED) from None
    except BenchError as error:
        raise BenchError(f"{error} What was measured is kept: --resume --out {folder} goes on.") from error
    return {**found, "provenance": provenance(sys.argv)}


def write(made: dict[str, Any], folder: Path) -> None:
    """The results, and what the engine reads, whose names on the command line become paths."""
    from eyas.bench.benchmark import write as write_whole

    use = made["use"]
    for name, content in use["files"].items():
        write_whole(folder / name, json.dumps(content, indent=1) + "\n")
    use["flags"] = [str(folder.resolve() / flag) if flag in use["files"] else flag for flag in use["flags"]]
    write_whole(folder / RESULTS, json.dumps(made, indent=1) + "\n")


# What is shown


def show(made: Mapping[str, Any], folder: Path, as_json: bool) -> None:
    if as_json:
        return print_json(made)
    out = console()
    out.width = min(out.width, WIDTH) if out.is_terminal else WIDTH
    out.print(clean(made["verdict"]["sentence"]))
    out.print(as_table("Predicted speedup of decoding steps, by concurrency", grid_cells(made["predicted"])))
    out.print(as_table(f"Measured, {made['rounds']} rounds in turn", measured_cells(made)))
    for one in made["dropped"]:
        out.print(clean(f"dropped: {one['name']}: {one['reason']}"))
    if made["apart"] is not None:
        out.print(f"Predictions, which leave prompts out, were {made['apart']:.0%} off what was measured (median).")
    for level, one in made["choice"].items():
        out.print(clean(f"concurrency {level}: {one['name']} ({one['speed']:,.1f} tok/s)"))
    if made["use"]["flags"]:
        out.print(clean(f"use: {shlex.join(made['use']['flags'])}"), soft_wrap=True)
    for note in (*made["use"]["notes"], *made["notes"]):
        out.print(clean(f"note: {note}"))
    out.print(clean(f"Everything is in {folder}."))


def grid_cells(predicted: Sequence[Mapping[str, Any]]) -> Cells:
    """A row for each shape, a column for each concurrency."""
    from eyas.engine.policy import describe

    levels = sorted({one["concurrency"] for one in predicted})
    plain = {one["concurrency"]: one["speed"] for one in predicted if one["shape"] is None}
    rows: dict[tuple[int, int, int], dict[int, str]] = {}
    for one in predicted:
        if one["shape"] and one["speed"] and plain.get(one["concurrency"]):
            size = tuple(one["shape"][n] for n in ("eagle_topk", "num_steps", "num_draft_tokens"))
            row = rows.setdefault(size, {})
            row[one["concurrency"]] = f"{one['speed'] / plain[one['concurrency']]:.2f}x ({one['tokens']:.2f})"
    named = {describe(DraftShape(steps, width, tokens)): row for (width, steps, tokens), row in sorted(rows.items())}
    cells = [[name, *(row.get(level, "-") for level in levels)] for name, row in named.items()]
    return [["draft (tokens per step)", *map(str, levels)], *cells]


def measured_cells(made: Mapping[str, Any]) -> Cells:
    header = ["concurrency", "", "tok/s", "speedup", "95% interval", "verdict", "length", "predicted", "off"]
    rows = []
    for row in made["measured"]:
        best = made["choice"].get(row["concurrency"], {}).get("name") == row["name"]
        high = "∞" if row["high"] is None else f"{row['high']:.2f}"
        rows.append(
            [
                str(row["concurrency"]),
                f"{row['name']}{' *' if best else ''}",
                f"{row['tokens_per_second']:,.1f}",
                f"{row['speedup']:.2f}x",
                f"{row['low']:.2f} to {high}",
                row["word"],
                "-" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}",
                "-" if row["predicted"] is None else f"{row['predicted']:.2f}x",
                "-" if row["apart"] is None else f"{row['apart']:+.0%}",
            ]
        )
    return [header, *rows]
