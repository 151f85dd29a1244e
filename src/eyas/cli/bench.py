"""``eyas bench``: with and without speculation on the same prompts, in turn: does it pay?"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eyas.cli.console import INTERRUPTED, clean, console, notice
from eyas.cli.eval import choose_drafter
from eyas.cli.options import OUTPUT, Debug, EngineFlags, LoadingFlags, ShapeFlags, refuse, spread
from eyas.core import SamplingParams, UsageError

if TYPE_CHECKING:
    from eyas.bench.benchmark import Benchmark
    from eyas.bench.pairing import Progress, Report
    from eyas.bench.passes import Level, Name, Pair
    from eyas.bench.profile import Profiled
    from eyas.bench.sides import Side
    from eyas.bench.workload import Workload
    from eyas.bridges.launch import Asked
    from eyas.engine.llm import LLM

ENDPOINTS_AT, EMBEDDED_AT = "1,2,4,8,16,32,64", "1,2,4,8,16,32"
TARGET = (
    "A model folder, a Hugging Face id, a GGUF file, or smollm2; with --engine a folder, or smollm2. Flags of that "
    "engine's own stand behind a bare --."
)
WIDTH = 110
SHOWN = (0, 1, 2, 3, 4, 5, 6, 9)  # of the report's columns, those that fit a terminal
_sides: Callable[..., Any] = partial(typer.Option, rich_help_panel="What is compared", show_default=False)
_launched: Callable[..., Any] = partial(typer.Option, rich_help_panel="An engine that is launched", show_default=False)
_load: Callable[..., Any] = partial(typer.Option, rich_help_panel="Load")
_prompts: Callable[..., Any] = partial(typer.Option, rich_help_panel="Prompts and answers")
_output: Callable[..., Any] = partial(typer.Option, rich_help_panel=OUTPUT)


@dataclass(frozen=True)
class ServerFlags:
    without: Annotated[
        str | None, _sides("--without", "--base-url-a", metavar="URL", help="An OpenAI-compatible server without it.")
    ] = None
    with_: Annotated[
        str | None, _sides("--with", "--base-url-b", metavar="URL", help="The same server launched with speculation.")
    ] = None
    model: Annotated[str | None, _sides(help="The served model's name, where there are several.")] = None
    completions: Annotated[
        bool, _sides("--completions", help="Send text to /v1/completions: for targets without a chat template.")
    ] = False

    def conflicts(
        self, target: str | None, drafter: str | None, *, launches: bool, embedded: bool
    ) -> list[tuple[object, str]]:
        """For ``refuse``. ``launches``: TARGET runs in a server too; ``embedded``: flags were given for one in Eyas."""
        if target is not None:
            named = self.without or self.with_
            return [
                (named, "TARGET is for an engine that is started here: it excludes servers."),
                (not launches and self != ServerFlags(), "--model and --completions are for servers."),
            ]
        own = "Flags for draft shape, engine and loading are for TARGET: servers were launched with theirs."
        return [
            (not (self.without and self.with_), "Name a TARGET, or two servers: --without URL and --with URL."),
            (drafter, "--drafter is for TARGET: servers have theirs."),
            (embedded, own),
        ]

    def sides(self, sampling: SamplingParams, seeded: bool) -> Mapping[Name, Side]:
        from eyas.bench.client import Endpoint
        from eyas.bench.sides import EndpointSide

        assert self.without is not None and self.with_ is not None
        plain, drafting = (
            Endpoint(u, model=self.model, completions=self.completions) for u in (self.without, self.with_)
        )
        return {
            "without": EndpointSide("without", plain, sampling, seeded),
            "with": EndpointSide("with", drafting, sampling, seeded),
        }


@dataclass(frozen=True)
class LaunchedFlags:
    engine: Annotated[
        Literal["local", "vllm", "sglang"],
        _launched(help="vllm or sglang: launch TARGET in it, with DRAFTER and without. Default: run it in Eyas."),
    ] = "local"
    engine_python: Annotated[
        Path | None, _launched(help="Its environment, or its Python. Default: where Eyas itself is installed.")
    ] = None
    no_check: Annotated[bool, _launched("--no-check", help="Start the pair as it is.")] = False
    share_gpus: Annotated[bool, _launched("--share-gpus", help="Although others compute on the GPUs.")] = False

    def conflicts(
        self, target: str | None, arguments: Sequence[str], engine: EngineFlags, loading: LoadingFlags
    ) -> list[tuple[object, str]]:
        """For ``refuse``. ``arguments`` are what stands behind --."""
        if self.engine == "local":
            what = "Flags behind --, --engine-python, --no-check and --share-gpus are for --engine vllm or sglang."
            return [(arguments or self != LaunchedFlags(), what)]
        own = "Flags for the embedded engine and for loading are not for --engine: its own stand behind --."
        return [
            (target is None or target.startswith("-"), f"--engine {self.engine} launches a TARGET: name it."),
            ((engine, loading) != (EngineFlags(), LoadingFlags()), own),
        ]

    def asked(self, target: str, drafter: str, arguments: Sequence[str]) -> Asked:
        from eyas.bridges.launch import Asked

        refuse((drafter == "untrained", f"{self.engine} needs a drafter of files: --drafter untrained is Eyas's."))
        return Asked(
            self.engine,
            target,
            drafter,
            tuple(arguments),
            self.engine_python,
            check=not self.no_check,
            share_gpus=self.share_gpus,
        )


@dataclass(frozen=True)
class LoadFlags:
    num_prompts: Annotated[
        int | None,
        _load(
            metavar="N",
            help="In each round and level; eyas bench asks as many of each task.",
            show_default="5 x concurrency, or 30 s of arrivals",
        ),
    ] = None
    warmup: Annotated[int, _load(metavar="N", help="Passes at each level that do not count.")] = 1
    dataset: Annotated[
        Path | None,
        _prompts(
            metavar="FILE",
            help="JSON lines with messages, a ShareGPT conversation or a prompt.",
            show_default="built-in prompts",
        ),
    ] = None
    task: Annotated[
        list[str] | None,
        _prompts(
            metavar="TASK",
            help="Only these of the built-in prompts: chat, code, maths, summarising, translation, long (repeatable).",
            show_default=False,
        ),
    ] = None
    output_len: Annotated[int, _prompts(help="Longest answer, in tokens.")] = 128
    temperature: Annotated[float, _prompts(help="0 takes the likeliest token.")] = 0.0

    def conflicts(self, rounds: int | None) -> list[tuple[object, str]]:
        """For ``refuse``."""
        least = {"--rounds": (rounds, 1), "--warmup": (self.warmup, 0), "--num-prompts": (self.num_prompts, 1)}
        low = [
            (given is not None and given < most, f"{flag} must be at least {most}, got {given}.")
            for flag, (given, most) in least.items()
        ]
        return [*low, (self.dataset and self.task, "--task chooses among the built-in prompts: it excludes --dataset.")]

    def sampling(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, max_tokens=self.output_len, seed=0)

    def workload(self) -> Workload:
        from eyas.bench.workload import builtin, from_file

        found = from_file(self.dataset) if self.dataset else builtin(self.task or ())
        for note in found.notes:
            notice(note)
        return found


@spread
def bench(
    context: typer.Context,
    target: Annotated[str | None, typer.Argument(help=TARGET, show_default=False)] = None,
    *,
    drafter: Annotated[str | None, _sides(help="For TARGET: a drafter's folder or weights file, or untrained.")] = None,
    servers: ServerFlags,
    launched: LaunchedFlags,
    side_by_side: Annotated[
        bool | None,
        _launched(
            "--side-by-side/--one-at-a-time",
            help="Both at once, or relaunched in turn, each round in a launch of its own. Default: at once on a CPU.",
        ),
    ] = None,
    profile: Annotated[
        bool,
        _launched(
            "--profile",
            help="When all is measured, launch each side once more and show where the time of a decode step goes, from "
            "the engine's own profiler.",
        ),
    ] = False,
    concurrency: Annotated[
        str | None,
        _load(metavar="N,N,...", help="Requests kept running.", show_default=f"{ENDPOINTS_AT}; TARGET: to 32"),
    ] = None,
    request_rate: Annotated[
        str | None,
        _load(
            metavar="R,R,...", help="Instead: requests a second, that arrive at random (Poisson).", show_default=False
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        _load(help="Of both sides in turn; at least 6 for a verdict.", show_default="10; one launch at a time 6"),
    ] = None,
    load: LoadFlags,
    ignore_eos: Annotated[bool, _prompts("--ignore-eos", help="All answers as long as that.")] = False,
    top_p: Annotated[float, _prompts(help="Only the likeliest tokens that make up p.")] = 1.0,
    top_k: Annotated[int, _prompts(help="Only the k likeliest tokens; 0 is off.")] = 0,
    seed: Annotated[
        int | None,
        _prompts(help="Request n is sampled with seed + n. Endpoints get it only if it is given.", show_default="0"),
    ] = None,
    min_speedup: Annotated[float, _output(help="It pays above this.")] = 1.0,
    out: Annotated[
        Path | None,
        _output(
            metavar="FILE.json", help="Results; what is measured goes to FILE.jsonl beside it.", show_default="by time"
        ),
    ] = None,
    resume: Annotated[bool, _output("--resume", help="Go on with --out, which broke off.")] = False,
    report: Annotated[bool, _output("--report", help="Write FILE.html too: one page with pictures.")] = False,
    form: Annotated[str, _output("--format", metavar="text|md|json", help="On stdout.")] = "text",
    show: Annotated[
        Path | None, _output(metavar="FILE.json", help="Measure nothing: show these results.", show_default=False)
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None, _output(help="Measure nothing: what changed between two results.", show_default=False)
    ] = None,
    debug: Debug = False,
    shape: ShapeFlags,
    engine: EngineFlags,
    loading: LoadingFlags,
) -> None:
    """Measure whether speculation pays: both sides on the same prompts, in turn, over many rounds.

    Exit code: 0 it pays at every level asked for, 4 at one it does not, 3 not shown, 1 failed or not to be judged.

    Examples:

    eyas bench smollm2 --drafter ./my-drafter --concurrency 1,8 --report

    eyas bench --without http://127.0.0.1:30000 --with http://127.0.0.1:30001 --concurrency 1,4,16

    eyas bench ./my-model --drafter ./my-drafter --engine vllm --concurrency 1,8 -- --max-model-len 4096

    eyas bench --without http://a:8000 --with http://b:8000 --request-rate 2,8 --dataset chats.jsonl --format md
    """
    shows, launches = show or compare, launched.engine != "local"
    embedded = (shape, engine, loading) != (ShapeFlags(), EngineFlags(), LoadingFlags())
    refuse(
        (form not in ("text", "md", "json"), f"--format is text, md or json, got {form!r}."),
        (shows and (target or servers != ServerFlags()), "--show and --compare measure nothing: name no sides."),
        (show and compare, "--show and --compare exclude each other."),
    )
    if compare is not None:
        return show_comparison(compare, form)
    if show is not None:
        from eyas.bench.benchmark import read

        return finish(read(show), show, report, form)
    refuse(
        *servers.conflicts(target, drafter, launches=launches, embedded=embedded),
        *launched.conflicts(target, context.args, engine, loading),
        (side_by_side is not None and not launches, "--side-by-side and --one-at-a-time are for --engine."),
        (
            profile and not launches,
            "--profile is for --engine vllm or sglang: servers that run have no profiler at hand.",
        ),
        (profile and request_rate, "--profile looks at so many requests at a time: it needs --concurrency."),
        (concurrency and request_rate, "--concurrency and --request-rate exclude each other."),
        *load.conflicts(rounds),
        (not 0 < min_speedup < 100, f"--min-speedup must be between 0 and 100, got {min_speedup}."),
        (resume and out is None, "--resume goes on with a file: name it with --out."),
        (engine.speculation == "off", "--speculation off leaves nothing to compare."),
    )
    check_installed()
    from eyas.bench import journal
    from eyas.bench.benchmark import Benchmark
    from eyas.bench.pairing import ROUNDS, Plan
    from eyas.bench.provenance import provenance, training_seconds
    from eyas.bench.statistics import ENOUGH

    sampling = replace(load.sampling(), top_p=top_p, top_k=top_k, ignore_eos=ignore_eos, seed=seed or 0)
    usual = ENDPOINTS_AT if launches or target is None else EMBEDDED_AT
    levels = levels_of(concurrency or usual, request_rate)
    chosen = choose_drafter(target, drafter, "with --drafter") if target else None
    workload = load.workload()
    where = out or Path(f"eyas-bench-{datetime.now():%Y%m%d-%H%M%S}.json")
    refuse((where.suffix != ".json", f"--out ends in .json, got {str(where)!r}."))
    journal.check(where.with_suffix(".jsonl"), resume)  # before anything is loaded
    seeded, blocks = seed is not None and load.temperature > 0, False
    sides: Mapping[Name, Side]
    profiled: Sequence[Profiled] = ()
    if target is None or chosen is None:
        sides = servers.sides(sampling, seeded)
    elif launches:
        from eyas.bench.launched import both

        pair, blocks = both(
            launched.asked(target, chosen, context.args),
            shape.shape(),
            sampling,
            side_by_side=side_by_side,
            running=most_running(levels),
            log=where,
            model=servers.model,
            completions=servers.completions,
            seeded=seeded,
        )
        sides = pair
        if profile:
            from eyas.bench.profile import prepared

            profiled = prepared(pair, where)
    else:
        sides = sides_of(loading.load(target, chosen, shape.shape(), engine, debug=debug), chosen, sampling)
    benchmark = Benchmark(
        sides,
        workload,
        Plan(levels, sampling, rounds or (ENOUGH if blocks else ROUNDS), load.num_prompts, load.warmup, blocks),
        where,
        resume,
        min_speedup,
        provenance(sys.argv),
        training_seconds(Path(chosen)) if chosen and Path(chosen).is_dir() else None,
    )
    made = run(benchmark)
    finish(with_profiles(made, profiled, benchmark) if profiled else made, where, report, form)


# What is asked for


def sides_of(llm: LLM, drafter: str, sampling: SamplingParams) -> Mapping[Name, Side]:
    """The engine of this process, drafting and not."""
    from eyas.bench.sides import Embedded, EngineSide

    pair = Embedded(llm, drafter)
    return {"without": EngineSide("without", pair, sampling), "with": EngineSide("with", pair, sampling)}


def check_installed() -> None:
    """Now, and not after hours of measuring."""
    if missing := [name for name in ("httpx", "scipy") if find_spec(name) is None]:
        raise UsageError(f"Benchmarks need {' and '.join(missing)}: install the extra eyas[bench].")


def most_running(levels: Sequence[Level]) -> int:
    """Requests at a time, where that is known beforehand."""
    return max(int(level.value) if level.kind == "concurrency" else 1 for level in levels)


def levels_of(concurrency: str, rate: str | None) -> tuple[Level, ...]:
    from eyas.bench.passes import Level

    flag, text = ("--request-rate", rate) if rate else ("--concurrency", concurrency)
    try:
        values = [float(part) if rate else int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or len(set(values)) < len(values) or not all(0 < value < math.inf for value in values):
        numbers = "numbers above 0" if rate else "whole numbers above 0"
        raise UsageError(f"{flag} takes different {numbers} with commas between them, got {text!r}.")
    return tuple(Level("request rate" if rate else "concurrency", value) for value in sorted(values))


# While it runs


def run(benchmark: Benchmark) -> dict[str, Any]:
    import asyncio

    try:
        with following() as report:
            return asyncio.run(benchmark.run(report))
    except KeyboardInterrupt:
        if benchmark.journal.exists():
            notice(f"what was measured is kept: --resume --out {benchmark.out} goes on.")
        raise typer.Exit(INTERRUPTED) from None


def with_profiles(made: dict[str, Any], profiled: Sequence[Profiled], benchmark: Benchmark) -> dict[str, Any]:
    """The results and, of the least and the most that was asked at once, where the time of a step goes; saved again."""
    import asyncio
    import json

    from eyas.bench.benchmark import write
    from eyas.bench.profile import profiles

    plan = benchmark.plan
    ends = list(dict.fromkeys((plan.levels[0], plan.levels[-1])))
    try:
        with following() as report:
            found, notes = asyncio.run(profiles(profiled, benchmark.workload, ends, plan.sampling, report))
    except KeyboardInterrupt:
        notice(f"the results are kept, without profiles: eyas bench --show {benchmark.out} shows them.")
        raise typer.Exit(INTERRUPTED) from None
    made = {**made, "profile": found, "notes": [*made["notes"], *notes]}
    write(benchmark.out, json.dumps(made, indent=1) + "\n")
    return made


@contextmanager
def following() -> Iterator[Report]:
    """On a terminal a bar with what is measured now; elsewhere a line for each round."""
    from rich import progress

    err, last = console(stderr=True), 0
    columns = progress.BarColumn(), progress.TaskProgressColumn(), progress.TimeElapsedColumn()
    with progress.Progress(
        *(*columns, progress.TimeRemainingColumn(), "{task.description}"),
        console=err,
        transient=True,
        disable=not err.is_terminal,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as bars:
        line = bars.add_task("", total=None)

        def report(news: Progress | str) -> None:
            nonlocal last
            if isinstance(news, str):
                bars.update(line, description=clean(news))
                if not err.is_terminal:
                    err.print(f"{clean(news)} ...", soft_wrap=True)
                return
            what = f"round {news.turn + 1}/{news.rounds}, {news.level}, {news.task}: {so_far(news.pairs, [news.level])}"
            bars.update(line, description=clean(what), total=1.0, completed=news.share)
            over = news.share >= 1 or 0 < last < news.turn + 1
            if over and not err.is_terminal:
                levels = list(dict.fromkeys(pair.level for pair in news.pairs))
                err.print(f"round {max(last, 1)} of {news.rounds}: {so_far(news.pairs, levels)}", soft_wrap=True)
            last = max(last, news.turn + 1)

        yield report


def so_far(pairs: Sequence[Pair], levels: Sequence[Level]) -> str:
    """Speeds and speedup at each level, of all that is measured yet."""
    from eyas.bench.passes import speed

    parts = []
    for level in levels:
        here = [pair for pair in pairs if pair.level == level]
        plain, speculative = (speed([pair.sides[name] for pair in here]) for name in ("without", "with"))
        if plain and speculative:
            parts.append(f"{speculative / plain:.2f}x at {level.value:g} ({plain:,.0f} -> {speculative:,.0f} tok/s)")
    return ", ".join(parts) or "no pair yet"


# What is shown


def finish(made: dict[str, Any], where: Path, report: bool, form: str) -> None:
    """Shows results, writes the page, and leaves with the verdict's exit code."""
    from eyas.bench.benchmark import write
    from eyas.bench.report import html, markdown

    if report:
        page = where.with_suffix(".html")
        write(page, html(made))
        notice(f"the report is {page}")
    if form == "json":
        from eyas.cli.records import print_json

        print_json(made)
    elif form == "md":
        print(clean(markdown(made)), end="")
    else:
        show_text(made, where)
    if code := made["verdict"]["exit_code"]:
        raise typer.Exit(code)


def show_text(made: Mapping[str, Any], where: Path) -> None:
    from rich.text import Text

    from eyas.bench import report
    from eyas.cli.eval import as_table

    out = console()
    out.width = min(out.width, WIDTH) if out.is_terminal else WIDTH
    colours = {"pays": "bold green", "not shown": "bold yellow"}
    verdict = made["verdict"]
    out.print(Text(report.title(made).upper(), colours.get(verdict["outcome"], "bold red")))
    out.print(clean(verdict["sentence"]))
    out.print(as_table("", [[row[n] for n in SHOWN] for row in report.cells(made)]))
    out.print(as_table("Latency in ms, p50 / p90 / p99", report.latency_cells(made)))
    if (profile := report.profile_cells(made))[1:]:
        out.print(as_table("Where the time of a step goes", profile))
        out.print(clean(report.profile_note(made)))
    for name, value in report.headline(made)[1:]:
        out.print(clean(f"{name}: {value}"))
    out.print(clean(made["agreement"]["sentence"]))
    for note in made["notes"]:
        out.print(clean(f"note: {note}"))
    out.print(clean(f"{report.confidence(made)} Everything is in {where}."))


def show_comparison(paths: tuple[Path, Path], form: str) -> None:
    from eyas.bench.benchmark import read
    from eyas.bench.compare import compare
    from eyas.bench.report import markdown_table
    from eyas.cli.eval import as_table

    cells, unlike = compare(*(read(path) for path in paths))
    if form == "json":
        from eyas.cli.records import print_json

        for row in cells[1:]:
            print_json(dict(zip(cells[0], row, strict=True)))
    elif form == "md":
        print(clean(markdown_table(cells)))
    else:
        out = console()
        out.width = out.width if out.is_terminal else 160
        out.print(as_table("", cells))
    for line in unlike:
        notice(f"they differ: {line}")
