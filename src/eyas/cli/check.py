"""``eyas check``: what a drafter is, and whether it fits a target in an engine, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eyas.cli.console import clean, counted
from eyas.cli.options import Debug, Json
from eyas.cli.records import print_json
from eyas.cli.tables import grid, page
from eyas.core import UsageError

if TYPE_CHECKING:
    from eyas.bridges.code.source import EngineSource
    from eyas.drafter.inspect import DrafterReport

DIALECTS = {"eagle": "official EAGLE", "sglang": "SGLang, SpecForge", "vllm": "vLLM speculators"}


def check(
    context: typer.Context,
    path: Annotated[
        str | None, typer.Argument(help="A drafter; with --drafter the target's folder.", show_default=False)
    ] = None,
    drafter: Annotated[
        Path | None, typer.Option(help="The drafter's folder or weights file.", show_default=False)
    ] = None,
    engine: Annotated[
        Literal["sglang", "vllm", "local"] | None, typer.Option(help="Who is to run the pair; local is Eyas.")
    ] = None,
    engine_path: Annotated[
        Path | None,
        typer.Option(help="Environment, source tree or wheel of the engine. Default: what is installed here."),
    ] = None,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="List every architecture of the engine with its EAGLE-3 status.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say what a drafter is, or whether it fits a target in an engine, without loading anything.

    With --drafter everything that would fail or silently go wrong is listed, each with its evidence in the engine's
    source, its consequence and a fix. The engine's own flags go behind --. Exits with 1 where something is wrong.

    Examples:
    eyas check ./my-drafter

    eyas check ./my-model --drafter ./my-drafter --engine sglang --engine-path ./sglang.whl

    eyas check ./my-model --drafter ./my-drafter --engine sglang -- --speculative-eagle-topk 4 --page-size 64

    eyas check --matrix --engine-path ./sglang.whl
    """
    if matrix:
        _matrix(path, engine, engine_path, as_json)
    elif path is None:
        raise UsageError("nothing to check: name a drafter, or a target with --drafter, or ask for --matrix")
    elif drafter is not None:
        _fit(path, drafter, engine, engine_path, context.args, as_json)
    elif engine or engine_path or context.args:
        raise UsageError("an engine needs both: eyas check TARGET --drafter D --engine ...")
    else:
        _drafter(Path(path), as_json)


def _drafter(path: Path, as_json: bool) -> None:
    from eyas.drafter.inspect import describe

    report = describe(path)
    if as_json:
        print_json(as_record(report))
    else:
        show(report)
    if report.problems:
        raise typer.Exit(1)


def _fit(
    target: str, drafter: Path, engine: str | None, engine_path: Path | None, arguments: list[str], as_json: bool
) -> None:
    from eyas.bridges.check import check as check_pair
    from eyas.bridges.flags import read_flags
    from eyas.cli.fit import report_record, show_report

    if engine is None and engine_path is None:
        raise UsageError("name the engine that is to run the pair: --engine sglang, vllm or local")
    source = None if engine == "local" else open_source(engine, engine_path)
    report = check_pair(target, drafter, source, read_flags(arguments))
    if as_json:
        print_json(report_record(report))
    else:
        show_report(report)
    if not report.fits:
        raise typer.Exit(1)


def _matrix(path: str | None, engine: str | None, engine_path: Path | None, as_json: bool) -> None:
    from eyas.bridges.matrix import matrix
    from eyas.cli.fit import matrix_record, show_matrix

    if path or engine == "local" or (engine is None and engine_path is None):
        raise UsageError("--matrix is about an engine alone: eyas check --matrix --engine-path PATH")
    source = open_source(engine, engine_path)
    rows = matrix(source)
    if as_json:
        print_json(matrix_record(source, rows))
    else:
        show_matrix(source, rows)


def open_source(engine: str | None, engine_path: Path | None) -> EngineSource:
    from eyas.bridges.code.source import engine_at, open_engine

    return open_engine(engine, engine_path) if engine else engine_at(engine_path or "")


def as_record(report: DrafterReport) -> dict[str, Any]:
    ids = report.layer_ids
    both = {"entry": ids.entry, "output": ids.output}
    return {"loads": not report.problems} | asdict(report) | {"path": str(report.path), "layer_ids": asdict(ids) | both}


def show(report: DrafterReport) -> None:
    from rich.text import Text

    out = page()
    rows: list[tuple[str, str | Text]] = [*facts(report)]
    rows += [("odd" if n == 0 else "", Text(clean(note), "yellow")) for n, note in enumerate(report.odd)]
    rows += [("problems" if n == 0 else "", Text(clean(note), "red")) for n, note in enumerate(shown(report.problems))]
    loads = Text("no: see problems", "bold red") if report.problems else Text("yes", "bold green")
    out.print(grid([*rows, ("loads in Eyas", loads)]))


def facts(report: DrafterReport) -> list[tuple[str, str]]:
    c = report.config
    vocabulary = f"{c.draft_vocab_size:,} of the target's {c.vocab_size:,} tokens"
    if c.draft_vocab_size == c.vocab_size:
        vocabulary = f"the target's {c.vocab_size:,} tokens"
    rope = ", ".join(f"{key} {value}" for key, value in c.rope.items() if key != "rope_type")
    return [
        ("drafter", str(report.path)),
        ("dialect", f"{DIALECTS[report.dialect]} ({'; '.join(report.evidence)})"),
        ("architecture", ", ".join(report.architectures) or "none named"),
        ("layers", counted(report.layers_found, "decoder layer")),
        ("sizes", f"hidden {c.hidden_size}, the target's {c.target_hidden_size}, MLP {c.intermediate_size}"),
        ("attention", f"{c.num_attention_heads} heads of {c.head_dim}, {c.num_key_value_heads} for keys and values"),
        ("positions", f"RoPE {c.rope['rope_type']}, {rope}; up to {c.max_position_embeddings:,}"),
        ("vocabulary", vocabulary),
        ("target states", layer_ids(report)),
        ("norms", norms(report)),
        ("embedding", report.embedding),
        ("head", report.head),
        ("weights", f"{report.parameters:,} in {', '.join(report.dtypes)}: {report.nbytes / 1e6:,.1f} MB"),
        ("files", ", ".join(report.files)),
    ]


def layer_ids(report: DrafterReport) -> str:
    ids = report.layer_ids
    if ids.entry is None or ids.output is None:
        return f"{report.config.num_aux}, entry ids [2, n // 2, n - 3] by default: the config names none"
    entry, output = (", ".join(map(str, numbers)) for numbers in (ids.entry, ids.output))
    return f"entry ids {entry} = output ids {output} (written as {ids.convention} ids {list(ids.written)} in {ids.key})"


def norms(report: DrafterReport) -> str:
    c = report.config
    extra = [
        name
        for name in ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual", "qk_norm")
        if getattr(c, name)
    ]
    return f"RMSNorm, eps {c.rms_norm_eps:g}; {', '.join(extra) or 'none beyond the standard ones'}"


def shown(problems: Sequence[str]) -> list[str]:
    """What fits a screen; ``--json`` has all of it."""
    more = [f"and {len(problems) - 12} more"] if len(problems) > 12 else []
    return [problem if len(problem) <= 600 else problem[:600] + " ..." for problem in problems[:12]] + more
