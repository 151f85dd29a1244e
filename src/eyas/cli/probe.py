"""``eyas probe``: why acceptance is low, by other readings of the checkpoint and by a trace of the real engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eyas.cli.console import clean, counted, notice, progress
from eyas.cli.eval import SMALLEST, numbers_of, read_prompts
from eyas.cli.options import Debug, EngineFlags, EnginePython, Json, LoadingFlags, refuse, spread
from eyas.cli.records import print_json
from eyas.cli.tables import as_table, page
from eyas.core import UsageError

if TYPE_CHECKING:
    from eyas.bridges.launch import Asked
    from eyas.bridges.probe import Measured, Pair, Readings
    from eyas.bridges.trace import Comparison, Trace
    from eyas.engine.llm import LLM

SETTINGS = {"allow_extra_args": True}


@spread
def probe(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(help="The target: a folder, or smollm2; a name Eyas can load.", show_default=False)
    ],
    drafter: Annotated[Path, typer.Argument(help="The drafter's folder or weights file.", show_default=False)],
    *,
    engine: Annotated[
        Literal["local", "vllm", "sglang"],
        typer.Option(help="Whose drafts to look at; local is Eyas, and tries other readings of the checkpoint only."),
    ] = "local",
    engine_python: EnginePython = None,
    reference: Annotated[
        Path | None,
        typer.Option(help="The drafter as it was trained, to compare with. Default: DRAFTER, as it is read best."),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="JSON lines with prompts or conversations, as for eyas eval (repeatable). Default: built-in ones.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="At most N prompts of each task: chat, code, maths.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Longest answer to each.")] = 32,
    write: Annotated[
        Path | None,
        typer.Option(metavar="OUT", help="Write the drafter as it is read best, with explicit layer ids."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a copy written earlier.")] = False,
    as_json: Json = False,
    debug: Debug = False,
    loading: LoadingFlags,
) -> None:
    """Find why acceptance is low.

    First the checkpoint is read in other ways too, with its layer ids one lower and one higher, the target's RoPE and
    the like, and each is measured on the same answers. With --engine the engine is then started for one answer,
    eagerly; what its drafter is fed and answers is compared with what it should be, and the first difference is named.
    The engine's own flags go behind --. Exits with 1 where a fault was found.

    Examples:
    eyas probe smollm2 ./my-drafter

    eyas probe ./my-model ./my-drafter --write ./my-drafter-fixed

    eyas probe ./my-model ./my-drafter --engine vllm --engine-python ~/vllm-env -- --max-model-len 4096

    eyas probe ./my-model ./converted --engine vllm --reference ./as-trained
    """
    given = {"--engine-python": engine_python, "--reference": reference, "the engine's own flags": context.args}
    refuse(
        *((engine == "local" and value, f"{name} needs --engine vllm or sglang") for name, value in given.items()),
        (limit < 1, f"--limit must be at least 1, got {limit}"),
        (max_tokens < 2, f"--max-tokens must be at least 2, got {max_tokens}"),
        (force and not write, "--force replaces what --write wrote earlier: name it"),
    )
    asked = None if engine == "local" else _asked(engine, target, drafter, context.args, engine_python)
    _check_files(drafter, reference, write, force)
    llm = _load(target, loading, debug)
    pair, asked_of = _pair(llm, drafter, loading, prompts, limit)
    with progress("measuring") as report:
        from eyas.bridges.probe import measure

        readings = measure(pair, asked_of, max_tokens, report)
    show: _Json | _Terminal = _Json() if as_json else _Terminal()
    show.readings(readings)
    if write is not None:
        show.wrote(_write(drafter, readings, write, force), write)
    comparison = None
    if asked is not None:
        longest = max(asked_of, key=len)  # rotations differ more, the further apart
        comparison, trace = _trace(asked, pair, longest, reference, readings)
        mended = "" if reference else readings.right.stage
        show.comparison(comparison, trace, engine, _cure(comparison, engine, mended, readings))
    if readings.verdict.fault or (comparison is not None and comparison.fault is not None):
        raise typer.Exit(1)


def _asked(
    engine: Literal["vllm", "sglang"], target: str, drafter: Path, arguments: list[str], python: Path | None
) -> Asked:
    """Raises UsageError where there is no such engine or target for it, before anything is loaded."""
    import os

    from eyas.bridges.launch import Asked, find_engine, find_python
    from eyas.bridges.target import open_target

    open_target(target)
    find_engine(engine, find_python(python), os.environ)
    return Asked(engine, target, drafter, tuple(arguments), python)


def _check_files(drafter: Path, reference: Path | None, write: Path | None, force: bool) -> None:
    from eyas.bridges.corrected import FILES
    from eyas.drafter.checkpoint import Checkpoint
    from eyas.drafter.convert import check_free
    from eyas.drafter.inspect import check_drafter

    source = Checkpoint.open(drafter).path
    if reference is not None:
        check_drafter(reference)
    if write is not None:
        check_free(write.expanduser(), source, force, FILES)


def _load(target: str, loading: LoadingFlags, debug: bool) -> LLM:
    plain = replace(loading, context_length=SMALLEST, drafter_layer_ids=None)
    return plain.load(target, None, None, EngineFlags(speculation="off"), debug=debug)


def _pair(
    llm: LLM, drafter: Path, loading: LoadingFlags, files: Sequence[Path] | None, limit: int
) -> tuple[Pair, list[list[int]]]:
    from eyas.bridges.probe import Pair

    found = read_prompts(llm, files, None, limit)
    for why, count in found.left_out.items():
        notice(f"prompts left out: {count}, {why}.")
    prompts = [prompt for task in found.by_task.values() for prompt in task]
    return Pair(llm.target, drafter, llm.engine.eos_ids, loading.layer_ids), prompts


def _write(drafter: Path, readings: Readings, out: Path, force: bool) -> str:
    from eyas.bridges import corrected
    from eyas.drafter import dialects
    from eyas.drafter.checkpoint import Checkpoint

    if not readings.verdict.name:
        raise UsageError(f"{out} was not written: {readings.verdict.text}")
    checkpoint = Checkpoint.open(drafter)
    return corrected.write(checkpoint, dialects.read(checkpoint), readings.right, out, force)


def _trace(
    asked: Asked, pair: Pair, prompt: Sequence[int], reference: Path | None, readings: Readings
) -> tuple[Comparison, Trace]:
    from eyas.bridges.probe import examine
    from eyas.bridges.recording import record
    from eyas.drafter.storage import load_for

    model = readings.model if reference is None else load_for(pair.target, reference)
    with progress(f"tracing {asked.engine}") as report:
        trace = record(asked, prompt, report, notice)
        report("comparing", None)
        return examine(pair.target, model, trace), trace


def _cure(comparison: Comparison, engine: str, mended: str, readings: Readings) -> str:
    from eyas.bridges.trace import fix

    written = readings.measured[0].hypothesis.config.aux_layer_ids or ()
    return fix(comparison.fault, engine, mended, written) if comparison.fault else ""


# What is shown


class _Json:
    def readings(self, readings: Readings) -> None:
        for measured in readings.measured:
            _emit("reading", **reading_record(measured))
        verdict = asdict(readings.verdict) | {"fault": readings.verdict.fault}
        _emit("verdict", **verdict, layer_ids=readings.right.config.aux_layer_ids, left_out=readings.left_out)

    def wrote(self, dialect: str, out: Path) -> None:
        _emit("written", path=str(out), dialect=dialect)

    def comparison(self, comparison: Comparison, trace: Trace, engine: str, fix: str) -> None:
        fault = comparison.fault
        said = {"fault": asdict(fault) | {"fix": fix} if fault else None}
        _emit("trace", **asdict(comparison) | said, dtype=trace.dtype, drafter=trace.about)


def _emit(kind: str, **record: Any) -> None:
    print_json({"kind": kind, **record})


def reading_record(measured: Measured) -> dict[str, Any]:
    config = measured.hypothesis.config
    return {
        "name": measured.name,
        "meaning": measured.hypothesis.meaning,
        "layer_ids": config.aux_layer_ids,
        **numbers_of(measured.stats),
        "interval": measured.interval,
        "agreement": measured.agreement,
        "better": measured.better,
    }


class _Terminal:
    def readings(self, readings: Readings) -> None:
        out = page()
        out.print(as_table("Acceptance by reading of the checkpoint", list(reading_cells(readings.measured))))
        for why in readings.left_out:
            notice(why)
        verdict = readings.verdict
        self._say("found" if verdict.fault else "fine", verdict.text, verdict.fix)

    def wrote(self, dialect: str, out: Path) -> None:
        print(f"wrote {out} ({dialect} dialect)", flush=True)

    def comparison(self, comparison: Comparison, trace: Trace, engine: str, fix: str) -> None:
        out = page()
        seen = f"{counted(comparison.steps, 'forward')} of {trace.about.get('class', 'the drafter')}, {trace.dtype}"
        cells = [
            ["stage", "largest typical deviation"],
            *([name, f"{off:.1%}"] for name, off in comparison.off.items()),
        ]
        out.print(as_table(f"Trace of {engine}: {seen}", cells))
        for note in comparison.notes:
            notice(note)
        if comparison.fault is None:
            text = f"{engine} feeds this drafter what it should, and it answers what it should; states "
            text += f"{comparison.limit:.1%} off would be a fault"
            finer = "" if trace.dtype == "float32" else f" in {trace.dtype}, less with -- --dtype float32"
            self._say("fine", text + finer, "")
            return
        where = f"slot {comparison.fault.place}"
        where += f", {comparison.fault.depth} into a draft" if comparison.fault.depth else ""
        text = f"{comparison.fault.stage}: {comparison.fault.text} (first seen at {where})"
        self._say("found", text, fix)

    def _say(self, label: str, text: str, fix: str) -> None:
        from rich.text import Text

        out = page()
        style = "bold red" if label == "found" else "bold green"
        out.print(Text.assemble((f"{label}: ", style), clean(text)))
        if fix:
            out.print(Text.assemble(("fix: ", "bold"), clean(fix)))


def reading_cells(measured: Sequence[Measured]) -> Iterator[list[str]]:
    yield ["reading", "entry ids", "acceptance length", "95% interval", "agreement", "better by (99%)"]
    for row in measured:
        yield [
            row.name,
            " ".join(map(str, row.hypothesis.config.aux_layer_ids or ())),
            f"{row.length:.2f}",
            "{:.2f} to {:.2f}".format(*row.interval),
            f"{row.agreement:.1%}",
            "{:+.1%} to {:+.1%}".format(*row.better) if row.better else "",
        ]
