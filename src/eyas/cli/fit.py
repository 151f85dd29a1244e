"""How ``eyas check`` shows whether a drafter fits a target in an engine, and what an engine can speculate on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from eyas.cli.console import clean
from eyas.cli.tables import grid, page

if TYPE_CHECKING:
    from rich.text import Text

    from eyas.bridges.code.source import EngineSource
    from eyas.bridges.matrix import Row
    from eyas.bridges.report import Problem, Report

STYLES = {"fails": "bold red", "silent": "red", "undecided": "yellow", "note": "dim"}
STATUSES = {
    "ready": ("ready", "green"),
    "delegate": ("delegation suffices", "yellow"),
    "undecided": ("decided at run time", "yellow"),
    "cannot": ("cannot", "red"),
}


def show_report(report: Report) -> None:
    from rich.text import Text

    out = page()
    names = [("engine", report.engine), ("target", report.target), ("drafter", report.drafter)]
    known = [(fact.name, fact.value) for fact in report.facts]
    out.print(grid([*names, *known]))
    if report.problems:
        out.print()
        out.print(grid([(problem.severity, problem_text(problem)) for problem in report.problems]))
    fits = Text("yes", "bold green") if report.fits else Text("no", "bold red")
    out.print(Text("\nfits  ") + fits)


def problem_text(problem: Problem) -> Text:
    from rich.text import Text

    text = Text(clean(problem.evidence), STYLES[problem.severity])
    text.append(f"\n=> {clean(problem.consequence)}", "default")
    for name, value in (("fix", problem.fix), ("see", problem.issue)):
        if value:
            text.append(f"\n{name}: {clean(value)}", "default")
    return text.append("\n")


def show_matrix(source: EngineSource, rows: Sequence[Row]) -> None:
    from rich.table import Table
    from rich.text import Text

    out = page()
    table = Table(title=f"EAGLE-3 targets of {source.label}", expand=True)
    for name in ("architecture", "status", "why"):
        table.add_column(name, overflow="fold")
    for row in rows:
        name, style = STATUSES[row.status]
        why = row.reason or (f"{row.inner} in self.{row.attribute} has the interface" if row.inner else "")
        table.add_row(clean(row.architecture), Text(name, style), clean(why))
    out.print(table)
    counts = Counter[str](row.status for row in rows)
    out.print(", ".join(f"{counts[status]} {name}" for status, (name, _) in STATUSES.items()))


def matrix_record(source: EngineSource, rows: Sequence[Row]) -> dict[str, Any]:
    from dataclasses import asdict

    return {"engine": source.name, "version": source.version, "architectures": [asdict(row) for row in rows]}


def report_record(report: Report) -> dict[str, Any]:
    from dataclasses import asdict

    return {"fits": report.fits} | asdict(report)
