"""Results for people: tables, a page of HTML that needs nothing else, Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.bench import charts
from eyas.bench.kernels import LABELS
from eyas.bench.results import whole_rows

SHOWN = 0.0005  # of a step: parts that are smaller on both sides are left out
TEMPLATES = Path(__file__).parent / "templates"
PARTS = {"draft": "draft", "target": "target", "rest": "rest"}  # of a step of the embedded engine
LATENCIES = {"first": "time to first token", "per_token": "time per output token", "total": "end to end"}
Results = Mapping[str, Any]
Cells = list[list[str]]


def cells(made: Results) -> Cells:
    """The first row is the header's."""
    header = [_kind(made), "task", "verdict", "speedup", "95% interval", "tok/s without", "tok/s with"]
    header += ["per user without", "per user with", "acceptance length", "step without", "step with", "failed"]
    return [header, *(_row(row) for row in made["rows"])]


def _row(row: Mapping[str, Any]) -> list[str]:
    acceptance, step = row["acceptance"] or {}, row["step"] or {}
    high = "∞" if row["high"] is None else f"{row['high']:.2f}"
    return [
        f"{row['level']['value']:g}",
        row["task"],
        row["word"],
        f"{row['speedup']:.2f}x",
        f"{row['low']:.2f} to {high}",
        *(_number(row[side]["tokens_per_second"]) for side in ("without", "with")),
        *(_number(row[side]["per_user"]) for side in ("without", "with")),
        _number(acceptance.get("acceptance_length"), ".2f"),
        *(_ms(step.get(side)) for side in ("without", "with")),
        f"{row['without']['failed']} / {row['with']['failed']}",
    ]


def latency_cells(made: Results) -> Cells:
    times = ["time to first token", "time per output token", "between pieces", "end to end"]
    found = [[_kind(made), "speculation", *times]]
    for row in whole_rows(made["rows"]):
        for side in ("without", "with"):
            told = [row[side][name] for name in ("first", "per_token", "between", "total")]
            shown = [" / ".join(_ms(t[p], "") for p in ("p50", "p90", "p99")) if t else "-" for t in told]
            found.append([f"{row['level']['value']:g}", side, *shown])
    return found


def profile_cells(made: Results) -> Cells:
    """Of a step of either side under a profiler; no rows but the header's where nothing was profiled."""
    found = [[_kind(made), "part of a step", "without", "with"]]
    for entry in made.get("profile", ()):
        sides = [entry["without"], entry["with"]]
        at = f"{entry['level']['value']:g}"
        for part, label in LABELS.items():
            if any(side and side["shares"][part] >= SHOWN for side in sides):
                found.append([at, label, *(_part(side, part) for side in sides)])
        found.append([at, "whole step", *(_whole(side) for side in sides)])
    return found


def _part(side: Mapping[str, Any] | None, part: str) -> str:
    if side is None:
        return "-"
    share = f"{side['shares'][part]:.1%}"
    return f"{_ms(side['seconds'][part])} ({share})" if side["seconds"] else share


def _whole(side: Mapping[str, Any] | None) -> str:
    if side is None:
        return "-"
    return f"{_ms(sum(side['seconds'].values()))}, of {side['steps']}" if side["seconds"] else "steps not counted"


def profile_note(made: Results) -> str:
    """How it was profiled; "" where nothing was."""
    sides = [side for entry in made.get("profile", ()) for side in (entry["without"], entry["with"]) if side]
    if not sides:
        return ""
    text = "By the engine's own profiler, in a launch of its own after the rounds: it slows steps down, above all the "
    text += "host's part. Means of steps that only decode."
    if any(side["ranks"] > 1 for side in sides):
        text += f" Rank 0 of {max(side['ranks'] for side in sides)} is shown."
    if any(side["device"] == "CPU" for side in sides):
        text += " On a CPU: operators of the busiest thread; what is between them is the host's."
    return text


def headline(made: Results) -> list[tuple[str, str]]:
    first, rate, repaid = whole_rows(made["rows"])[0], made["agreement"], made["repaid"]
    at, length = _level(first["level"]), (first["acceptance"] or {}).get("acceptance_length")
    hours = repaid[0]["hours"] if repaid else None
    found = [
        (f"speedup at {at}", f"{first['speedup']:.2f}x"),
        (f"acceptance length at {at}", _number(length, ".2f", "unknown")),
        ("speculation efficiency, speedup / acceptance length", _number(first["efficiency"], ".2f", "")),
        ("break-even concurrency", break_even(made)),
        ("of the answers are the same", f"{rate['same'] / rate['answers']:.0%}" if rate["answers"] else "-"),
        (f"hours at {at} until the training is repaid", _number(hours, unknown="")),
    ]
    return [(name, value) for name, value in found if value]


def title(made: Results) -> str:
    """The verdict in a few words: where it pays at some levels and not at others, that."""
    words = {row["word"] for row in whole_rows(made["rows"])}
    outcome = str(made["verdict"]["outcome"])
    return "pays at some levels only" if outcome == "does not pay" and "pays" in words else outcome


def break_even(made: Results) -> str:
    """Where the speedup falls to 1, or on which side of what was measured that is."""
    rows, place, even = whole_rows(made["rows"]), made["verdict"]["break_even"], made["verdict"]["even"]
    if rows[0]["level"]["kind"] != "concurrency":
        return "-"
    if place is not None:
        return f"about {place:.0f}" if place >= 10 else f"about {place:.1f}"
    if all(row["speedup"] > even for row in rows):
        return f"above {rows[-1]['level']['value']:g}"
    return f"below {rows[0]['level']['value']:g}" if all(row["speedup"] <= even for row in rows) else "none found"


def confidence(made: Results) -> str:
    rounds = min(row["rounds"] for row in whole_rows(made["rows"]))
    text = f"{rounds} rounds of both sides in turn; intervals from resampling whole rounds."
    if _kind(made) != "concurrency":
        text += " At a request rate, speedup is that of each user's tokens per second, waiting included."
    return text


def facts(made: Results) -> list[tuple[str, str]]:
    about, settings = made["provenance"], made["settings"]
    sampling = settings["sampling"]
    client = about.get("client", {})
    hardware = ", ".join(str(value) for value in (client.get("cpu"), *client.get("gpus", ())) if value)
    found = [
        ("without", _side(made["sides"]["without"])),
        ("with", _side(made["sides"]["with"])),
        ("prompts", f"{settings['prompts']}: {', '.join(settings['tasks'])}"),
        ("answers", f"at most {sampling['max_tokens']} tokens" + (", end ignored" if sampling["ignore_eos"] else "")),
        ("sampling", "greedy" if not sampling["temperature"] else f"temperature {sampling['temperature']:g}"),
        ("seed", str(sampling["seed"])),
        ("rounds", f"{settings['rounds']}, after {settings['warmup']} to warm up at each level"),
        ("client's machine", f"{hardware}, {client.get('cores')} cores, {client.get('memory_gib')} GiB"),
        ("system", str(client.get("system"))),
        ("Eyas", f"{about.get('eyas')}, commit {about.get('commit') or 'unknown'}"),
        ("packages", ", ".join(f"{name} {v}" for name, v in about.get("packages", {}).items())),
        ("when", str(about.get("when"))),
        ("command", " ".join(about.get("command", ()))),
    ]
    return [(name, value) for name, value in found if value]


def html(made: Results) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    rows = whole_rows(made["rows"])
    acceptance = rows[0]["acceptance"]
    table = cells(made)
    return environment.get_template("report.html").render(
        verdict=made["verdict"],
        title=title(made),
        css=_css,
        confidence=confidence(made),
        headline=headline(made),
        several=len({row["task"] for row in made["rows"]}) > 1,
        first=_level(rows[0]["level"]),
        charts=_charts(rows, made),
        profile=profile_cells(made),
        profile_note=profile_note(made),
        acceptance_source=f"{acceptance['source']}, {_level(rows[0]['level'])}" if acceptance else "",
        table=table,
        whole=[row in rows for row in made["rows"]],
        latencies=latency_cells(made),
        agreement=made["agreement"],
        samples=made["samples"],
        tinted=any(drafted for sample in made["samples"] for _, drafted in sample["pieces"]),
        notes=made["notes"],
        facts=facts(made),
    )


def _charts(rows: Sequence[Mapping[str, Any]], made: Results) -> dict[str, Any]:
    """The page's pictures, which are safe as they are."""
    from markupsafe import Markup

    rates, even = (rows[0]["acceptance"] or {}).get("acceptance_rates"), made["verdict"]["even"]
    ends = [rows[0], rows[-1]] if len(rows) > 1 else [rows[0]]
    latency = []
    for row in ends:
        figures = []
        for name, title in LATENCIES.items():
            curves = {side: row[side]["curves"][name] for side in ("without", "with")}
            if all(curves.values()):
                figures.append((title, Markup(charts.quantiles(curves, title))))
        latency.append((_level(row["level"]), figures))
    return {
        "speedup": Markup(charts.speedup(rows, even)),
        "acceptance": Markup(charts.bars(rates, "Acceptance rate by draft position")) if rates else "",
        "steps": [(place, Markup(chart), legend) for place, chart, legend in _steps(rows, made)],
        "latency": latency,
    }


def _steps(rows: Sequence[Mapping[str, Any]], made: Results) -> Iterator[tuple[str, str, Mapping[Any, str]]]:
    """Where it was looked into, the picture of a step of either side, and what its colours mean."""
    if (step := rows[0]["step"]) and step["parts"]:
        yield _level(rows[0]["level"]), charts.steps(step["parts"], PARTS), PARTS
    for entry in made.get("profile", ()):
        sides = {name: entry[name] for name in ("without", "with") if entry[name]}
        legend = {p: label for p, label in LABELS.items() if any(s["shares"][p] >= SHOWN for s in sides.values())}
        unit = "ms" if all(side["seconds"] for side in sides.values()) else "%"
        told = {name: side["seconds" if unit == "ms" else "shares"] for name, side in sides.items()}
        parts = {name: {part: values[part] for part in legend} for name, values in told.items()}
        yield f"{_level(entry['level'])}, profiled", charts.steps(parts, LABELS, unit), legend


def markdown(made: Results) -> str:
    verdict, profile = made["verdict"], profile_cells(made)
    parts = [
        f"### Speculation: {title(made)}",
        verdict["sentence"],
        "\n".join(f"* {name}: **{value}**" for name, value in headline(made)),
        markdown_table(cells(made)),
        f"Latency in ms, p50 / p90 / p99:\n\n{markdown_table(latency_cells(made))}",
        f"Where the time of a step goes:\n\n{markdown_table(profile)}\n\n{profile_note(made)}" if profile[1:] else "",
        made["agreement"]["sentence"],
        "\n".join(f"* {note}" for note in made["notes"]),
        "\n".join(f"* {name}: {value}" for name, value in facts(made)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown_table(rows: Cells) -> str:
    rule = ["---", *("---:" for _ in rows[0][1:])]
    clean = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (rows[0], rule, *rows[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in clean)


def _css(outcome: str) -> str:
    return {"not judged": "refused"}.get(outcome, outcome.split()[0])


def _side(side: Mapping[str, Any]) -> str:
    shape = side["shape"]
    drafts = ""
    if shape:
        drafts = f", {shape['num_steps']} steps, top-k {shape['eagle_topk']}, {shape['num_draft_tokens']} draft tokens"
    version = f" {side['version']}" if side["version"] else ""
    return f"{side['model'] or side['served']} in {side['engine']}{version} at {side['where']}{drafts}"


def _kind(made: Results) -> str:
    return str(made["rows"][0]["level"]["kind"])


def _level(level: Mapping[str, Any]) -> str:
    return f"{level['kind']} {level['value']:g}"


def _number(value: float | None, form: str = ",.1f", unknown: str = "-") -> str:
    return unknown if value is None else format(value, form)


def _ms(seconds: float | None, unit: str = " ms") -> str:
    if seconds is None:
        return "-"
    value = 1000 * seconds
    return f"{value:,.0f}{unit}" if value >= 100 else f"{value:.3g}{unit}"
