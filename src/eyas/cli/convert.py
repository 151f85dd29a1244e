"""``eyas convert``: a drafter as another engine spells it, without touching its weights."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eyas.cli.console import clean
from eyas.cli.options import Debug, Json
from eyas.cli.records import print_json
from eyas.cli.tables import grid, page
from eyas.core import UsageError

if TYPE_CHECKING:
    from eyas.drafter.convert import Conversion


def convert(
    drafter: Annotated[Path, typer.Argument(help="A drafter's folder or weights file.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="The folder to write.", show_default=False)],
    to: Annotated[Literal["eagle", "sglang", "vllm"], typer.Option(help="Who is to load it.", show_default=False)],
    target: Annotated[
        Path | None,
        typer.Option(help="The target's folder: raises max_position_embeddings and names the target to vLLM."),
    ] = None,
    engine_path: Annotated[
        Path | None,
        typer.Option(help="Environment, source tree or wheel of the engine: refuse what this version cannot run."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier conversion.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a drafter for another engine: same weights, bit for bit, other names and config.

    Refuses what the destination would compute differently. The new folder holds a record of where every value came
    from, eyas_conversion.json.

    Examples:

    eyas convert ./speculators-drafter ./for-sglang --to sglang

    eyas convert ./my-drafter ./for-vllm --to vllm --target ./my-model
    """
    from eyas.bridges.code.source import open_engine
    from eyas.drafter.convert import convert as do
    from eyas.drafter.verifier import Verifier

    if engine_path and to == "eagle":
        raise UsageError("--engine-path is for --to sglang or vllm: no engine is looked at for EAGLE's own dialect.")
    verifier = Verifier.read(target) if target else None
    engine = open_engine(to, engine_path).find if engine_path else None
    done = do(drafter, to, out, target=verifier, engine=engine, force=force)
    if as_json:
        print_json(as_record(done))
    else:
        show(done)


def as_record(done: Conversion) -> dict[str, Any]:
    return asdict(done) | {"source": str(done.source), "out": str(done.out)}


def show(done: Conversion) -> None:
    from rich.text import Text

    from eyas.cli.check import DIALECTS

    out = page()
    before, after = (DIALECTS[dialect] for dialect in done.dialects)
    rows: list[tuple[str, str | Text]] = [
        ("converted", f"{done.source} ({before})"),
        ("to", f"{done.out} ({after})"),
        ("weights", f"{done.tensors} tensors, {done.nbytes / 1e6:,.1f} MB, every bit as it was"),
    ]
    rows += [("note" if n == 0 else "", Text(clean(note), "yellow")) for n, note in enumerate(done.notes)]
    for change in done.changes:
        rows.append((change.what, Text(clean(f"{change.before} -> {change.after}"), "bold")))
        rows.append(("", Text(clean(change.why), "dim")))
    out.print(grid(rows))
