"""Tables and lists of facts as several verbs show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from eyas.cli.console import clean, console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

WIDTH = 100
Cells = list[list[str]]  # the first row is the header's


def page() -> Console:
    """Stdout, no wider than reads well."""
    out = console()
    out.width = min(out.width, WIDTH)
    return out


def grid(rows: Sequence[tuple[str, str | Text]], style: str = "") -> Table:
    """Names and values in two columns."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style=style, no_wrap=True)
    table.add_column(style=style, overflow="fold")
    for name, value in rows:
        table.add_row(name, clean(value) if isinstance(value, str) else value)
    return table


def as_table(title: str, cells: Cells) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title, "bold"), title_justify="left")
    for number, name in enumerate(cells[0]):
        table.add_column(name, justify="right" if number else "left")
    for row in cells[1:]:
        table.add_row(*map(clean, row))
    return table


def print_markdown(tables: Sequence[tuple[str, Cells]]) -> None:
    from eyas.bench.report import markdown_table

    for title, cells in tables:
        print(f"### {title}\n\n{markdown_table(cells)}\n")
