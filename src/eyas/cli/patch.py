"""``eyas patch``: what a wrapper lacks, written into the installed engine's source, and taken out again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from eyas.cli.check import open_source
from eyas.cli.console import clean, console, notice
from eyas.cli.options import Debug, Json
from eyas.cli.records import print_json
from eyas.core import EyasError, UsageError

if TYPE_CHECKING:
    from eyas.bridges.code.source import EngineSource
    from eyas.bridges.patch import Edit
    from eyas.bridges.report import Report


def patch(
    target: Annotated[
        str | None, typer.Argument(help="The target's folder; its config.json is enough.", show_default=False)
    ] = None,
    engine: Annotated[
        Literal["sglang", "vllm"] | None, typer.Option(help="Whose source to change.", show_default=False)
    ] = None,
    engine_path: Annotated[
        Path | None, typer.Option(help="Its environment or source tree. Default: what is installed here.")
    ] = None,
    drafter: Annotated[
        Path | None, typer.Option(help="A drafter: eyas check is run on the pair behind the patch.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Change the files without asking.")] = False,
    undo: Annotated[bool, typer.Option("--revert", help="Restore every file that was patched.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Add what a wrapper lacks for EAGLE-3 to an installed SGLang or vLLM.

    Shows what would change, and changes it once you agree. eyas launch does the same without touching a file, which
    is the better way wherever it can be used. The originals stay next to the files, for --revert.

    Examples:
    eyas patch ./Kimi-K2.5 --engine sglang

    eyas patch ./Kimi-K2.5 --engine sglang --engine-path ./venv --drafter ./my-drafter --yes

    eyas patch --revert --engine sglang
    """
    if engine is None and engine_path is None:
        raise UsageError("name the engine to patch: --engine sglang or vllm, or --engine-path")
    if undo == (target is not None):
        raise UsageError("eyas patch takes a target's folder, or --revert and no target")
    if undo and (drafter or yes):
        raise UsageError("--revert restores what was patched; --drafter and --yes say nothing about it")
    if as_json and not (yes or undo):
        raise UsageError("--json cannot ask; add --yes")
    from eyas.bridges.patch import alone

    source = open_source(engine, engine_path)
    with alone(source):
        if undo:
            _revert(source, as_json)
        else:
            _patch(source, target or "", drafter, engine_path, yes, as_json)


def _patch(
    source: EngineSource, target: str, drafter: Path | None, engine_path: Path | None, yes: bool, as_json: bool
) -> None:
    from eyas.bridges import patch as bridge
    from eyas.bridges.target import open_target

    _drop_stale(source)
    edits = bridge.plan(source, open_target(target))
    if not as_json:
        show(edits)
    if not yes:
        _ask(edits)
    bridge.apply(edits)
    report = _verified(source, target, drafter, engine_path, edits)
    if as_json:
        print_json(as_record(source, edits, report))
    else:
        print(f"patched and checked: {', '.join(str(edit.file) for edit in edits)}")
        if report is not None:
            from eyas.cli.fit import show_report

            show_report(report)
    if report is not None and not report.fits:
        raise typer.Exit(1)  # the engine has what the target needs; this drafter still does not fit


def _drop_stale(source: EngineSource) -> bool:
    """Says which patches are not in their files, as after an upgrade of the engine, and forgets them."""
    from eyas.bridges import patch as bridge

    dropped = bridge.drop_stale(source)
    for file in dropped:
        notice(
            f"{file} holds nothing of its patch, as after an upgrade or where patching was interrupted: it stays as it "
            "is, and the patch is forgotten"
        )
    return bool(dropped)


def _ask(edits: Sequence[Edit]) -> None:
    if not sys.stdin.isatty():
        raise UsageError("nothing was changed; --yes changes it")
    if not typer.confirm(f"change {', '.join(str(edit.file) for edit in edits)}?"):
        raise typer.Exit(1)


def _verified(
    source: EngineSource, target: str, drafter: Path | None, engine_path: Path | None, edits: Sequence[Edit]
) -> Report | None:
    """Looks at the changed source anew. Where something is still missing, everything is put back."""
    from eyas.bridges import patch as bridge
    from eyas.bridges.check import check
    from eyas.bridges.code.source import open_engine
    from eyas.bridges.target import open_target

    try:
        after = open_engine(source.name, engine_path)
        if left := bridge.missing(after, open_target(target)):
            raise EyasError(f"still missing behind the patch: {'; '.join(change.what for change in left)}")
        return check(target, drafter, after) if drafter else None
    except BaseException:
        bridge.revert([edit.file for edit in edits])
        raise


def _revert(source: EngineSource, as_json: bool) -> None:
    from eyas.bridges import patch as bridge

    dropped, files = _drop_stale(source), bridge.patched_files(source)
    if not files and not dropped:
        raise UsageError(f"{source.label} at {source.place} is not patched: there is nothing to revert")
    bridge.revert(files)
    if as_json:
        print_json({"restored": [str(file) for file in files]})
    else:
        for file in files:
            print(f"restored {file}")


def show(edits: Sequence[Edit]) -> None:
    from rich.text import Text

    out = console()
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for edit in edits:
        for line in edit.diff().splitlines():
            out.print(Text(clean(line), styles.get(line[:1], "")), soft_wrap=True)
        for what in edit.what:
            out.print(Text(clean(what), "bold"))
        out.print()


def as_record(source: EngineSource, edits: Sequence[Edit], report: Report | None) -> dict[str, Any]:
    from eyas.cli.fit import report_record

    files = [
        {"file": str(edit.file), "original": str(edit.original), "what": edit.what, "diff": edit.diff()}
        for edit in edits
    ]
    checked = report_record(report) if report else None
    return {"engine": source.name, "version": source.version, "patched": files, "check": checked}
