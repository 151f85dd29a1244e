"""From pairs of passes to what is reported: a row for each level and task, and the verdict. Plain JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from eyas.bench.agreement import STRANGE, Agreement
from eyas.bench.passes import PARTS, SIDES, STEPS, BenchError, Level, Name, Pair, Pass, speed
from eyas.bench.statistics import CONFIDENCE, curve, speedup, spread
from eyas.bench.verdict import Found, Verdict, judge
from eyas.bridges.metrics import Speculation, total

ALL = "all"  # the name of all tasks together
SAMPLES = 6


def found_at(pairs: Sequence[Pair], levels: Sequence[Level], family: int) -> list[Found]:
    """The speedup at each level; the intervals that decide hold for ``family`` of them together (Bonferroni)."""
    found = []
    for level in levels:
        by_round = rounds(pairs, level)
        with_, without = (
            [speed([pair.sides[name] for pair in turn]) for turn in by_round] for name in ("with", "without")
        )
        good = [n for n in range(len(with_)) if with_[n] > 0 and without[n] > 0]
        if not good:
            raise BenchError(f"No side wrote a token at {level}: there is nothing to compare.")
        speeds = [with_[n] for n in good], [without[n] for n in good]
        passes: list[list[Pass]] = [[pair.sides[name] for turn in by_round for pair in turn] for name in SIDES]
        found.append(
            Found(
                level,
                shown=speedup(*speeds),
                held=speedup(*speeds, confidence=1 - (1 - CONFIDENCE) / family),
                rounds=len(good),
                failed=max(map(failed_share, passes)),
            )
        )
    return found


def failed_share(passes: Sequence[Pass]) -> float:
    return sum(len(one.failed) for one in passes) / sum(len(one.answers) for one in passes)


def rounds(pairs: Sequence[Pair], level: Level) -> list[list[Pair]]:
    """The pairs of a level, by round."""
    turns = sorted({pair.turn for pair in pairs if pair.level == level})
    return [[pair for pair in pairs if pair.level == level and pair.turn == turn] for turn in turns]


def assemble(pairs: Sequence[Pair], levels: Sequence[Level], even: float = 1.0) -> tuple[list[dict[str, Any]], Verdict]:
    """The rows, those of all tasks together first at each level, and the verdict, which is theirs."""
    tasks = list(dict.fromkeys(pair.task for pair in pairs))
    whole = found_at(pairs, levels, len(levels))
    by_task = {
        task: found_at([pair for pair in pairs if pair.task == task], levels, len(levels) * len(tasks))
        for task in (tasks if len(tasks) > 1 else [])
    }
    rows = []
    for number, level in enumerate(levels):
        here = [pair for pair in pairs if pair.level == level]
        rows.append(row(ALL if len(tasks) > 1 else tasks[0], whole[number], here, even))
        rows += [row(t, found[number], [p for p in here if p.task == t], even) for t, found in by_task.items()]
    return rows, judge(whole, even)


def row(task: str, found: Found, pairs: Sequence[Pair], even: float) -> dict[str, Any]:
    sides: dict[Name, list[Pass]] = {name: [pair.sides[name] for pair in pairs] for name in SIDES}
    numbers: dict[str, Any] = {name: side_numbers(sides[name]) for name in SIDES}
    acceptance = together([one.speculation for one in sides["with"]])
    return {
        "level": vars(found.level),
        "task": task,
        "word": found.word(even),
        "speedup": found.shown.middle,
        "low": found.shown.low,
        "high": finite(found.shown.high),
        "held": [found.held.low, finite(found.held.high)],
        "rounds": found.rounds,
        **numbers,
        "acceptance": acceptance.as_record() if acceptance else None,
        "efficiency": found.shown.middle / length if acceptance and (length := acceptance.acceptance_length) else None,
        "step": step_times(sides, acceptance),
    }


def side_numbers(passes: Sequence[Pass]) -> dict[str, Any]:
    """Seconds, and tokens a second: of all requests together, and of each by itself once it has begun."""
    good = [answer for one in passes for answer in one.good]
    streamed = [answer for answer in good if answer.first is not None]
    timed = [answer for answer in streamed if answer.per_token]
    times = {
        "first": [answer.first for answer in streamed],
        "per_token": [answer.per_token for answer in timed],
        "between": [gap for answer in streamed for gap in answer.gaps],
        "total": [answer.total for answer in good],
    }
    decoding = sum(answer.total - (answer.first or 0.0) for answer in timed)
    return {
        "tokens_per_second": sum(one.tokens for one in passes) / sum(one.seconds for one in passes),
        "per_user": sum(answer.tokens - 1 for answer in timed) / decoding if decoding else None,
        "requests": len(good),
        "failed": sum(len(one.failed) for one in passes),
        "tokens": sum(one.tokens for one in passes),
        "prompt_tokens": sum(answer.prompt_tokens or 0 for answer in good),
        "running": sum(one.running * one.seconds for one in passes) / sum(one.seconds for one in passes),
        **{name: spread(values) for name, values in times.items()},  # type: ignore[arg-type]
        "curves": {name: curve(values) for name, values in times.items() if name != "between"},  # type: ignore[arg-type]
    }


def together(parts: Sequence[Speculation | None]) -> Speculation | None:
    """All of some passes by their counts; nothing where one of them has none, as means have no weights."""
    known = [part for part in parts if part is not None and part.steps is not None]
    if not known or len(known) < len(parts):
        return None
    whole = total(known, known[0].source)
    return None if whole.acceptance_length is None else whole


def _mean_note(pairs: Sequence[Pair]) -> list[str]:
    """An acceptance length that comes as a mean is said once: it is of no single level or task."""
    means = [one for pair in pairs if (one := pair.with_.speculation) and one.steps is None and one.mean_length]
    if not means:
        return []
    last = means[-1]
    return [f"acceptance length {last.mean_length:.2f} at the end, says {last.source} ({'; '.join(last.notes)})"]


def step_times(sides: Mapping[Name, Sequence[Pass]], acceptance: Speculation | None) -> dict[str, Any] | None:
    """Seconds of a step on either side, and where an engine can be looked into, of its parts.

    Elsewhere they follow from the time per token, and from how many tokens a step makes.
    """
    if all(one.spent.get(STEPS) for passes in sides.values() for one in passes):
        parts = {name: _parts(passes) for name, passes in sides.items()}
        return {name: sum(p.values()) for name, p in parts.items()} | {"parts": parts, "measured": True}
    plain = [a.per_token for one in sides["without"] for a in one.good if a.per_token]
    with_ = [a.per_token for one in sides["with"] for a in one.good if a.per_token]
    length = acceptance.acceptance_length if acceptance else None
    if not plain or not with_ or length is None:
        return None
    mean = sum(with_) / len(with_)
    return {"without": sum(plain) / len(plain), "with": mean * length, "parts": None, "measured": False}


def _parts(passes: Sequence[Pass]) -> dict[str, float]:
    steps = sum(one.spent[STEPS] for one in passes)
    return {part: sum(one.spent[part] for one in passes) / steps for part in PARTS}


def samples(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """An answer of each task, from the first level, with its drafted tokens where they are known."""
    found: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        answers = [one for one in pair.with_.good if one.text]
        if pair.task not in found and answers:
            pieces = answers[0].pieces or ((answers[0].text, False),)
            found[pair.task] = {"key": answers[0].key, "pieces": [list(piece) for piece in pieces]}
    return list(found.values())[:SAMPLES]


def round_records(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """The numbers that speedups are made of."""
    return [
        {
            "round": pair.turn + 1,
            "level": vars(pair.level),
            "task": pair.task,
            "order": list(pair.order),
            **{n: {"tokens": one.tokens, "seconds": one.seconds, "busy": one.busy} for n, one in pair.sides.items()},
        }
        for pair in pairs
    ]


def notes_of(pairs: Sequence[Pair]) -> list[str]:
    """What was said of the passes, once each, with how often; and the failures."""
    counts: dict[str, int] = {}
    for pair in pairs:
        for name, one in pair.sides.items():
            for text in (*one.notes, *(f"a request failed: {answer.error}" for answer in one.failed)):
                entry = f"{name} speculation: {text}"
                counts[entry] = counts.get(entry, 0) + 1
    said = [f"{text}{f' ({count} times)' if count > 1 else ''}" for text, count in counts.items()]
    return said + _mean_note(pairs)


def repaid(training_seconds: float, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Hours of serving with speculation after which the training has been saved, by level; None: never.

    An hour with it does what ``speedup`` hours do without.
    """
    hours = training_seconds / 3600
    return [
        {"level": one["level"], "hours": hours / (one["speedup"] - 1) if one["speedup"] > 1 else None}
        for one in whole_rows(rows)
    ]


def whole_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The row of each level that stands for all its tasks, which is its first."""
    return [row for n, row in enumerate(rows) if n == 0 or row["level"] != rows[n - 1]["level"]]


def disagreement(found: Agreement) -> list[str]:
    """Why greedy answers that differ leave nothing to judge."""
    reasons = []
    if found.strange:
        what = f"{found.at_once:,} of {found.answers:,} greedy answers differ from their first words on"
        if found.at_once <= STRANGE * found.answers:
            what = f"Only {found.same:,} of {found.answers:,} greedy answers are the same on both sides, but without "
            what += f"speculation {found.itself[1]:,} of {found.itself[0]:,} in other rounds"
        reasons.append(
            f"{what}: the sides do not run the same model with the same prompts, or the acceptance is simulated."
        )
    if found.bugs:
        reasons.append(f"{found.bugs} differences between greedy answers are no near-ties: speculation has a bug.")
    return reasons


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
