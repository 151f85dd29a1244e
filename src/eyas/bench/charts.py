"""Charts as inline SVG: colours come from the page, so that they are dark or light with it; every mark has a title."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 22, 14, 40
ROW = 34  # of a bar that lies


def speedup(rows: Sequence[Mapping[str, Any]], even: float) -> str:
    """Speedup over the levels, with its interval."""
    xs = _places(len(rows))
    tops = [row["high"] if row["high"] is not None else row["speedup"] for row in rows]
    scale, marks = _axis(max(*tops, even))
    parts = [_grid(marks, scale, "{:g}x")]
    parts.append(f'<line class="even" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{scale(even):.1f}" y2="{scale(even):.1f}"/>')
    if len(rows) > 1:
        above = [(x, scale(top)) for x, top in zip(xs, tops, strict=True)]
        below = [(x, scale(row["low"])) for x, row in zip(xs, rows, strict=True)]
        parts.append(f'<polygon class="band" points="{_points([*above, *reversed(below)])}"/>')
        line = [(x, scale(row["speedup"])) for x, row in zip(xs, rows, strict=True)]
        parts.append(f'<polyline class="with" points="{_points(line)}"/>')
    for x, row, top in zip(xs, rows, tops, strict=True):
        title = f"{row['level']['value']:g}: {row['speedup']:.2f}x, from {row['low']:.2f} to {top:.2f}"
        whisker = f'<line class="whisker" x1="{x}" x2="{x}" y1="{scale(row["low"]):.1f}" y2="{scale(top):.1f}"/>'
        place = f'cx="{x}" cy="{scale(row["speedup"]):.1f}" r="4"'
        dot = f'<circle class="with" {place}><title>{escape(title)}</title></circle>'
        parts += [whisker, dot, _under(x, f"{row['level']['value']:g}")]
    return _svg("Speedup", HEIGHT, *parts, _below(str(rows[0]["level"]["kind"])))


def quantiles(curves: Mapping[str, Sequence[float]], what: str) -> str:
    """Which share of the requests had it by when: a line for each side. Milliseconds; the slowest stand at the edge."""
    marks = _marks(max(1000 * values[-2] for values in curves.values()))

    def across(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(value / marks[-1], 1.0)

    scale, shares = _axis(100.0)
    parts = [_grid(shares, scale, "{:g}%"), *(_under(across(mark), f"{mark:g}") for mark in marks)]
    for name, values in curves.items():
        steps = [(across(1000 * v), scale(100 * n / (len(values) - 1))) for n, v in enumerate(values)]
        title = f"{name} speculation: median {1000 * values[len(values) // 2]:.4g} ms"
        line = f'<polyline class="{escape(name)}" points="{_points(steps)}">'
        parts.append(f"{line}<title>{escape(title)}</title></polyline>")
    return _svg(what, HEIGHT, *parts, _below("ms"))


def bars(values: Sequence[float | None], what: str) -> str:
    """Shares from 0 to 1, by position; a gap where one is unknown."""
    scale, marks = _axis(1.0)
    xs, parts = _places(len(values)), [_grid(marks, scale, "{:.0%}")]
    width = min(34.0, 0.7 * (WIDTH - LEFT - RIGHT) / max(len(values), 1))
    for number, (x, value) in enumerate(zip(xs, values, strict=True), start=1):
        if value is not None:
            y = scale(value)
            shape = f'x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{HEIGHT - BOTTOM - y:.1f}"'
            parts.append(f'<rect class="with" {shape}><title>position {number}: {value:.1%}</title></rect>')
            parts.append(f'<text x="{x}" y="{y - 4:.1f}" text-anchor="middle">{100 * value:.0f}</text>')
        parts.append(_under(x, str(number)))
    return _svg(what, HEIGHT, *parts, _below("draft position"))


def steps(parts: Mapping[str, Mapping[Any, float]], labels: Mapping[Any, str], unit: str = "ms") -> str:
    """A step of each side, and what it is made of: seconds, or with ``unit`` "%" shares of a whole."""
    longest = max(sum(p.values()) for p in parts.values()) or 1.0
    made, left = [], 64
    for row, (side, pieces) in enumerate(parts.items()):
        x, y, whole = float(left), TOP + row * ROW, sum(pieces.values())
        made.append(f'<text x="{left - 8}" y="{y + 17}" text-anchor="end">{escape(side)}</text>')
        for name, value in pieces.items():
            width = (WIDTH - left - 70) * value / longest
            time = "" if unit == "%" else f"{1000 * value:.3g} ms, "
            title = f"{side} speculation, {labels[name]}: {time}{value / (whole or 1.0):.1%}"
            place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="24"'
            made.append(f'<rect class="{escape(name)}" {place}><title>{escape(title)}</title></rect>')
            x += width
        if unit != "%":
            made.append(f'<text x="{x + 6:.1f}" y="{y + 17}">{1000 * whole:.3g} ms</text>')
    return _svg("Time of a step", TOP + ROW * len(parts) + 4, *made)


# Scales


def _axis(most: float) -> tuple[Any, list[float]]:
    """From 0 upwards: where a value stands, and the marks."""
    marks = _marks(most)

    def scale(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / marks[-1]

    return scale, marks


def _marks(most: float, about: int = 5) -> list[float]:
    """Round numbers from 0 to beyond ``most``."""
    rough = (most if most > 0 else 1.0) / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 2.5, 5, 10) if power * n >= rough * 0.999)
    return [round(step * n, 12) for n in range(math.ceil(about * rough / step - 1e-9) + 1)]


def _places(count: int) -> list[float]:
    step = (WIDTH - LEFT - RIGHT) / max(count, 1)
    return [round(LEFT + step * (n + 0.5), 1) for n in range(count)]


# Pieces


def _svg(title: str, height: float, *parts: str) -> str:
    inner = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{inner}</svg>'


def _grid(marks: Sequence[float], scale: Any, form: str) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{scale(mark):.1f}" y2="{scale(mark):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{scale(mark) + 4:.1f}" text-anchor="end">{form.format(mark)}</text>'
        for mark in marks
    )


def _under(x: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(text)}</text>'


def _below(text: str) -> str:
    x = (LEFT + WIDTH - RIGHT) / 2
    return f'<text class="axis" x="{x}" y="{HEIGHT - 6}" text-anchor="middle">{escape(text)}</text>'


def _points(pairs: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)
