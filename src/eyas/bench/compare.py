"""Two benchmarks beside one another: what changed from the first to the second, and by how much more than chance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.bench.passes import BenchError

Results = Mapping[str, Any]
ABOUT = ("prompts", "tasks", "num_prompts")


def compare(before: Results, after: Results) -> tuple[list[list[str]], list[str]]:
    """Cells, the header's first, of the levels and tasks that both have; and what else differs between them.

    Raises BenchError where they have none in common.
    """
    rows = {_key(row): row for row in before["rows"]}
    both = [(rows[_key(row)], row) for row in after["rows"] if _key(row) in rows]
    if not both:
        raise BenchError("These two benchmarks have no level and task in common: there is nothing to compare.")
    header = ["level", "task", "speedup before", "after", "change", "tok/s without", "tok/s with", "acceptance length"]
    return [header, *(_cells(*pair) for pair in both)], _unlike(before, after)


def _cells(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [
        f"{after['level']['kind']} {after['level']['value']:g}",
        after["task"],
        *(f"{row['speedup']:.2f}x [{row['low']:.2f}, {_top(row):.2f}]" for row in (before, after)),
        _change(before, after),
        *(
            f"{before[side]['tokens_per_second']:,.1f} -> {after[side]['tokens_per_second']:,.1f}"
            for side in ("without", "with")
        ),
        " -> ".join(_length(row) for row in (before, after)),
    ]


def _change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Of the speedup. Where the two intervals overlap, it may be chance."""
    change = after["speedup"] / before["speedup"] - 1
    overlap = after["low"] <= _top(before) and before["low"] <= _top(after)
    return f"{change:+.1%}{' (intervals overlap)' if overlap else ''}"


def _unlike(before: Results, after: Results) -> list[str]:
    found = []
    for name in ABOUT:
        one, other = (made["settings"][name] for made in (before, after))
        if one != other:
            found.append(f"{name.replace('_', ' ')}: {one} before, {other} after")
    samplings = [made["settings"]["sampling"] for made in (before, after)]
    for name in samplings[0]:
        if samplings[0][name] != samplings[1].get(name):
            found.append(f"{name}: {samplings[0][name]} before, {samplings[1].get(name)} after")
    for side in ("without", "with"):
        one, other = (made["sides"][side] for made in (before, after))
        for name in ("engine", "version", "model", "shape"):
            if one[name] != other[name]:
                found.append(f"{name} {side} speculation: {one[name]} before, {other[name]} after")
    machines = [made["provenance"].get("client", {}).get("cpu") for made in (before, after)]
    if machines[0] != machines[1]:
        found.append(f"client's machine: {machines[0]} before, {machines[1]} after")
    return found


def _key(row: Mapping[str, Any]) -> tuple[str, float, str]:
    return row["level"]["kind"], row["level"]["value"], row["task"]


def _top(row: Mapping[str, Any]) -> float:
    return float("inf") if row["high"] is None else row["high"]


def _length(row: Mapping[str, Any]) -> str:
    length = (row["acceptance"] or {}).get("acceptance_length")
    return "?" if length is None else f"{length:.2f}"
