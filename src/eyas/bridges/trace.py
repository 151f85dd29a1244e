"""What a drafter was fed and answered in an engine, beside what it should have been: the first difference is the fault.

Pure functions over what the plugin recorded (plugin/src/eyas_plugin/trace.py) and what Eyas computes for the same
tokens (reference.py). States are compared by their sketches: a norm, and sums of the values with fixed signs, which lie
as far apart as the states do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from eyas.core import EyasError

Sketch = Sequence[float]
Top = Sequence[tuple[int, float]]  # target ids and logits, the largest first

# How far apart the target's states may lie, relative to their size, and still be the same: rounding in another order,
# through all layers. The states of neighbouring layers are further apart than that.
STATES = {"float32": 0.01, "float16": 0.04, "bfloat16": 0.12}
# The drafter has a layer or two: what it makes of them is the same up to some times what they differ by, or up to this.
DRAFTER = {"float32": 0.003, "float16": 0.01, "bfloat16": 0.03}
_TIMES, _LOGITS = 3.0, 10.0  # logits may be off by so much more, in units of a row's standard deviation
STAGES = ("tokens", "positions", "states", "embedding", "fusion", "carried", "layer", "rope", "cache", "head", "d2t")


@dataclass(frozen=True)
class Row:
    """One slot of the drafter. ``states``: those of the target, one for each captured layer; () in a drafted slot.

    ``entering`` is what the first layer takes beside the embedding: the fused states, or what the last forward left.
    """

    token: int
    position: int
    states: Sequence[Sketch]
    entering: Sketch
    embedding: Sketch
    normed: Sketch  # what the head takes
    top: Top = ()  # () where the engine asked for no logits
    spread: float = 0.0  # the standard deviation of all logits, in a reference


@dataclass(frozen=True)
class Step:
    """A forward of the drafter. Row i is the slot at ``place`` + i; ``depth`` 0: with true states, else a draft's."""

    place: int
    depth: int
    rows: Sequence[Row]


@dataclass(frozen=True)
class Trace:
    """``tokens`` are prompt and answer: the slot at place i is to be fed token i + 1."""

    tokens: Sequence[int]
    prompt: int  # how many of them
    steps: Sequence[Step]
    dtype: str = "float32"
    about: Mapping[str, Any] = field(default_factory=dict)  # engine, class and config of the drafter, as recorded


@dataclass(frozen=True)
class Reference:
    """The same steps as they should be. ``layers[place][L]`` is the state entering layer L, ``ids`` those fed."""

    steps: Sequence[Step]
    ids: tuple[int, ...]
    layers: Sequence[Sequence[Sketch]]


@dataclass(frozen=True)
class Difference:
    """``stage`` is one of STAGES; ``place`` the slot, ``depth`` how far into a draft. ``off``: how far, relative."""

    stage: str
    place: int
    depth: int
    text: str
    off: float | None = None
    captured: tuple[int, ...] = ()  # of "states": the entry ids that were fed, where they are any layer's


@dataclass(frozen=True)
class Comparison:
    """``fault`` is the first difference, None without one. ``off``: the largest typical deviation by stage.

    ``limit``: the deviation of a drafter's state that would be a fault, by how far the target's own states are apart.
    """

    fault: Difference | None
    steps: int
    rows: int
    off: Mapping[str, float]
    limit: float
    notes: tuple[str, ...] = ()


def fix(difference: Difference, engine: str, mended: str = "", written: Sequence[int] = ()) -> str:
    """What to do about it. ``mended``: the stage where the reading found right departs from the checkpoint as it is.

    ``written``: the entry ids that the checkpoint names, right or wrong.
    """
    obeys = difference.stage != "states" or difference.captured == tuple(written)
    if difference.stage == mended and obeys:
        return f"{engine} does what the checkpoint says, so that is what has to be corrected: --write OUT does it"
    if difference.captured and obeys:
        return (
            f"{engine} feeds what DRAFTER names, and the reference was trained on others: eyas convert REFERENCE OUT "
            f"--to {engine}"
        )
    return _FIXES[difference.stage].format(engine=engine)


_FIXES = {
    "tokens": "not the checkpoint's fault: token ids and states are paired by {engine}; try another version of it, and "
    "report it there with what --json prints",
    "positions": "not the checkpoint's fault: {engine} counts the drafter's positions; try another version of it, and "
    "report it there with what --json prints",
    "states": "write the layer ids where {engine} reads them, and as it does: eyas convert DRAFTER OUT --to {engine}; "
    "eyas check says which code reads them",
    "embedding": "compare embed_tokens.weight with the target's: a drafter without one of its own is lent the target's",
    "fusion": "fc.weight, or a norm before it (fc_norm, norm_before_fc), is another or is not read: eyas check DRAFTER "
    "lists both; eyas convert DRAFTER OUT --to {engine} writes what it knows",
    "carried": "norm_output decides which state goes on: write it where {engine} reads it, eyas convert DRAFTER OUT "
    "--to {engine}",
    "layer": "norm_before_residual, rms_norm_eps or weights of the layer are read otherwise (unknown names are dropped "
    "silently by some): eyas convert DRAFTER OUT --to {engine}",
    "rope": "compare rope_theta, rope_scaling and rope_parameters in the drafter's config.json: {engine} reads the one "
    "or the other by its transformers; eyas convert DRAFTER OUT --to {engine} writes all",
    "cache": "not the checkpoint's fault: the drafter's KV cache in {engine}; start it with another attention backend "
    "for the drafter, and report it there with what --json prints",
    "head": "lm_head.weight is another, is lent by the target, or is tied: eyas check DRAFTER says which it should be",
    "d2t": "the draft vocabulary's map is missing, of another drafter, or holds ids in place of offsets (target id = "
    "i + d2t[i]): eyas convert DRAFTER OUT --to {engine}, from the checkpoint as it was trained",
}


# From the plugin's lines to steps


def read(lines: Sequence[Mapping[str, Any]], prompt: Sequence[int], answer: Sequence[int]) -> Trace:
    """The trace of one greedy answer, drafted in chains. Raises EyasError where the lines hold no draft."""
    about = next((line for line in lines if line["call"] == "drafter"), {})
    forwards = list(_forwards(lines))
    tokens = [*prompt, *answer]
    steps = list(_placed(forwards, tokens, len(prompt)))
    if not any(step.depth == 0 and len(step.rows) for step in steps) or not any(r.top for s in steps for r in s.rows):
        raise EyasError(
            f"the engine's drafter left no trace of a draft ({len(lines)} calls): it ran compiled or in graphs, or "
            "is of a class that the plugin does not know"
        )
    return Trace(tokens, len(prompt), steps, str(about.get("dtype", "float32")), dict(about))


def _forwards(lines: Sequence[Mapping[str, Any]]) -> Iterator[list[Row]]:
    states: Sequence[Any] = ()
    rows: list[Row] = []
    for line in lines:
        if line["call"] == "fuse":
            states = line["states"]
        elif line["call"] == "forward":
            if rows:
                yield rows
            every = states or [()] * len(line["tokens"])
            keys = ("tokens", "positions", "entering", "embedding", "normed")
            columns = [line[key] for key in keys]
            rows = [Row(t, p, s, x, e, n) for s, t, p, x, e, n in zip(every, *columns, strict=False)]
            states = ()
        elif line["call"] == "logits" and rows:
            rows = _answered(rows, line)
    if rows:
        yield rows


def _answered(rows: list[Row], line: Mapping[str, Any]) -> list[Row]:
    """With the logits at the rows that they were asked for: all, those whose state was given to the head, the last."""
    tops = [tuple((int(i), float(v)) for i, v in top) for top in line["top"]]
    if "normed" in line:
        places = [min(range(len(rows)), key=lambda i: distance(rows[i].normed, given)) for given in line["normed"]]
    else:
        places = list(range(len(rows)))[-len(tops) :]
    found = dict(zip(places, tops, strict=False))
    return [replace(row, top=found.get(i, ())) for i, row in enumerate(rows)]


def _placed(forwards: Sequence[list[Row]], tokens: Sequence[int], prompt: int) -> Iterator[Step]:
    """Where each forward belongs: the prompt, then a draft, and what the target made of it, by turns.

    Greedy verification accepts drafted tokens as long as they are the answer's; rows behind are of rejected ones.
    """
    done, depth = 0, 0
    drafted: list[tuple[int, ...]] = []
    for rows in forwards:
        if rows[0].states:
            # of the prompt all that is left of it, behind it the root and each accepted token
            valid = prompt - done if done < prompt else 1 + _accepted(drafted, rows, tokens[done + 1 :])
            valid = min(valid, len(rows), len(tokens) - 1 - done)
            yield Step(done, 0, rows[:valid])
            done, depth = done + valid, 0
            if done == len(tokens) - 1:
                return  # more may have been accepted than was answered: from which slot it drafts is not known
            drafted = [_best(row) for row in rows[valid - 1 : valid] if row.top]
        elif done >= prompt:
            depth += 1
            drafted[depth - 1 :] = [(rows[0].token,), *(_best(row) for row in rows[:1] if row.top)]
            yield Step(done - 1 + depth, depth, rows[:1])


def _best(row: Row) -> tuple[int, ...]:
    """The likeliest token; several of the same logit, of which engines take one or the other: bfloat16 has ties."""
    return tuple(token for token, value in row.top if value == row.top[0][1])


def _accepted(drafted: Sequence[tuple[int, ...]], rows: Sequence[Row], following: Sequence[int]) -> int:
    """How many drafted tokens are the answer's. Which of a tie was drafted last, the slot behind it tells: it is fed
    the token after it, if it was right.
    """
    for n, (best, token) in enumerate(zip(drafted, following, strict=False)):
        behind = [row.token for row in rows[n + 1 : n + 2]]
        if token not in best or (len(best) > 1 and behind != list(following[n + 1 : n + 2])):
            return n
    return min(len(drafted), len(following))


# The comparison


def distance(one: Sketch, other: Sketch) -> float:
    """How far apart two states are, relative to the larger: from the sums, 0 for two that are nothing."""
    apart = math.sqrt(sum((a - b) ** 2 for a, b in zip(one[1:], other[1:], strict=True)))
    size = max(math.hypot(*one[1:]), math.hypot(*other[1:]))
    return 0.0 if size == 0 else apart / size if math.isfinite(apart) else math.inf


def compare(recorded: Trace, reference: Reference, dtype: str | None = None) -> Comparison:
    """Step by step, and within each in the order in which things are computed. ``dtype``: the coarser of both sides."""
    kind = dtype or recorded.dtype
    most = STATES.get(kind, STATES["bfloat16"])
    base = recorded.steps[0].rows[0].position - recorded.steps[0].place
    off: dict[str, float] = {}
    wrong = _states(recorded.steps[0], reference, most, off)
    limit = max(DRAFTER.get(kind, DRAFTER["bfloat16"]), 0.0 if wrong else _TIMES * off["states"])
    notes = (*_position_notes(recorded, base), *_size_notes(recorded.steps[0], reference.steps[0], limit))
    before: Step | None = None
    fault, rows = None, 0
    for step, wanted in zip(recorded.steps, reference.steps, strict=True):
        rows += len(step.rows)
        looks = (
            _tokens(step, wanted, recorded, before),
            _positions(step, base),
            _states(step, reference, most, off),
            _embedding(step, wanted, limit, off),
            _entering(step, wanted, limit, off),
            _normed(step, wanted, limit, off, step.depth == 0 and step.place < recorded.prompt),
            _logits(step, wanted, _LOGITS * limit, off),
        )
        fault = next((found for found in looks if found is not None), None)
        if fault is not None:
            break
        before = step
    return Comparison(fault, len(recorded.steps), rows, off, limit, notes)


def _tokens(step: Step, wanted: Step, recorded: Trace, before: Step | None) -> Difference | None:
    at = next((i for i, (r, w) in enumerate(zip(step.rows, wanted.rows, strict=True)) if r.token != w.token), None)
    if step.depth:
        best = _best(before.rows[-1]) if before and before.rows[-1].top else ()
        if best and step.rows[0].token not in best:
            text = f"the engine goes on with token {step.rows[0].token}, where its own best was {best[0]}"
            return Difference("d2t", step.place, step.depth, text)
        return None
    if at is None:
        return None
    place, fed = step.place + at, [row.token for row in step.rows]
    by = _shift(fed, recorded.tokens, step.place)
    what = f"token {step.rows[at].token} in place of {wanted.rows[at].token}"
    if by is not None:
        moved = f"slot i is fed token i{by:+d}" if by else "slot i is fed token i itself"
        what = f"{moved}, where the drafter was trained on token i + 1"
    return Difference("tokens", place, 0, f"{what} (slot {place})")


def _shift(fed: Sequence[int], tokens: Sequence[int], place: int) -> int | None:
    """By how much the token ids were moved against their states, if that is what happened."""
    for by in (0, 2, -1, 3):
        pairs = [(t, place + i + by) for i, t in enumerate(fed) if 0 <= place + i + by < len(tokens)]
        if len(pairs) > 1 and sum(t == tokens[at] for t, at in pairs[:-1]) >= 0.9 * len(pairs[:-1]):
            return by
    return None


def _position_notes(recorded: Trace, base: int) -> tuple[str, ...]:
    drafted = {row.position - s.place - i - base for s in recorded.steps if s.depth for i, row in enumerate(s.rows)}
    notes = []
    if base:
        notes.append(f"positions begin at {base}, which changes nothing under RoPE")
    if drafted == {1}:
        notes.append(
            "drafted slots are one position further than those with true states; older versions of SGLang do that, and "
            "it costs little"
        )
    return tuple(notes)


def _size_notes(step: Step, wanted: Step, limit: float) -> tuple[str, ...]:
    sizes = [r.embedding[0] / w.embedding[0] for r, w in zip(step.rows, wanted.rows, strict=True) if w.embedding[0]]
    if not sizes or abs(median(sizes) - 1) <= limit:
        return ()
    return (f"embeddings are {median(sizes):.3g} times as large as here, which the norm behind them takes out",)


def _positions(step: Step, base: int) -> Difference | None:
    for i, row in enumerate(step.rows):
        off = row.position - step.place - i - base
        if off not in (0, 1) or (off and not step.depth):
            text = f"slot {step.place + i} is at position {row.position}, where {step.place + i + base} was expected"
            return Difference("positions", step.place + i, step.depth, text)
    return None


def _states(step: Step, reference: Reference, limit: float, off: dict[str, float]) -> Difference | None:
    if step.depth:
        return None
    places = range(step.place, step.place + len(step.rows))
    if len(step.rows[0].states) != len(reference.ids):
        text = f"the engine feeds {len(step.rows[0].states)} states a token, the drafter takes {len(reference.ids)}"
        return Difference("states", step.place, 0, text)
    fed, apart = [], []
    for slot, wanted in enumerate(reference.ids):
        pairs = [(row.states[slot], reference.layers[place]) for row, place in zip(step.rows, places, strict=True)]
        by_layer = [
            median(distance(state, layers[layer]) for state, layers in pairs)
            for layer in range(len(reference.layers[step.place]))
        ]
        nearest = min(range(len(by_layer)), key=by_layer.__getitem__)
        apart.append(by_layer[wanted])
        # neighbours of a deep target may lie within the limit: rounding cannot bring another layer so much nearer
        wrong = by_layer[wanted] > limit or (by_layer[nearest] < by_layer[wanted] / 2 and by_layer[wanted] > limit / 4)
        fed.append((nearest if by_layer[nearest] <= limit else None) if wrong else wanted)
    off["states"] = max(off.get("states", 0.0), max(apart))
    if fed == list(reference.ids):
        return None
    named = [layer for layer in fed if layer is not None]
    if len(named) == len(fed):
        text = (
            f"the engine feeds the states entering layers {named}, where the drafter was trained on "
            f"{list(reference.ids)} (output ids {[i - 1 for i in named]} in place of "
            f"{[i - 1 for i in reference.ids]})"
        )
    else:
        bad = [wanted for layer, wanted in zip(fed, reference.ids, strict=True) if layer is None]
        text = f"in place of the states entering layers {bad} the engine feeds what no layer of this target gives"
    return Difference("states", step.place, 0, text, max(apart), tuple(named) if len(named) == len(fed) else ())


def _deviations(step: Step, wanted: Step, part: str) -> list[float]:
    return [distance(getattr(r, part), getattr(w, part)) for r, w in zip(step.rows, wanted.rows, strict=True)]


def _embedding(step: Step, wanted: Step, limit: float, off: dict[str, float]) -> Difference | None:
    """But for their size, which the norm that is next takes out."""
    pairs = [(r.embedding, w.embedding) for r, w in zip(step.rows, wanted.rows, strict=True)]
    typical = median(distance(_unit(r), _unit(w)) for r, w in pairs)
    off["embedding"] = max(off.get("embedding", 0.0), typical)
    if typical <= limit:
        return None
    text = "the embeddings of the same tokens are others"
    return Difference("embedding", step.place, step.depth, text, typical)


def _unit(sketch: Sketch) -> Sketch:
    return [value / sketch[0] for value in sketch] if sketch[0] else sketch


def _entering(step: Step, wanted: Step, limit: float, off: dict[str, float]) -> Difference | None:
    stage = "carried" if step.depth else "fusion"
    typical = median(_deviations(step, wanted, "entering"))
    off[stage] = max(off.get(stage, 0.0), typical)
    if typical <= limit:
        return None
    text = "the target's states are right, and what fc (or a norm before it) makes of them is not"
    if step.depth:
        text = "what the drafter hands from one drafted token to the next is another state"
    return Difference(stage, step.place, step.depth, text, typical)


def _normed(step: Step, wanted: Step, limit: float, off: dict[str, float], prompt: bool) -> Difference | None:
    """The slot at place 0 sees only itself, whatever the rotation: what differs there is not attention."""
    found = _deviations(step, wanted, "normed")
    first, later = found[: step.place == 0], found[step.place == 0 :]
    for stage, values in (("layer", first), ("rope" if prompt else "cache", later)):
        if not values:
            continue
        typical = median(values[len(values) // 2 :])
        off[stage] = max(off.get(stage, 0.0), typical)
        if typical > limit:
            return Difference(stage, step.place + len(found) - len(values), step.depth, _SAYS[stage], typical)
    return None


_SAYS = {
    "layer": "same inputs, and other states from the first slot on: the weights, norms or residual of the draft layer",
    "rope": "same inputs, same first slot, and other states behind it: the drafter's attention rotates otherwise (or "
    "scales, or sees less)",
    "cache": "same inputs, and other states: what earlier slots left in the drafter's cache is not theirs",
}


def _logits(step: Step, wanted: Step, limit: float, off: dict[str, float]) -> Difference | None:
    """``limit`` in units of the standard deviation of a row's logits."""
    pairs = [(r, w) for r, w in zip(step.rows, wanted.rows, strict=True) if r.top]
    if not pairs:
        return None
    apart = median(_off_by(row.top, right) for row, right in pairs)
    off["head"] = max(off.get("head", 0.0), apart)
    if apart > limit:
        text = "the head takes the right state and gives other logits"
        return Difference("head", step.place, step.depth, text, apart)
    share = sum(_strange(row.top, right, limit) for row, right in pairs) / sum(len(row.top) for row, _ in pairs)
    off["d2t"] = max(off.get("d2t", 0.0), share)
    if share <= _STRANGE:
        return None
    row, right = pairs[-1]
    text = f"the logits are right and their tokens are not: {[token for token, _ in row.top[:3]]} in place of "
    text += f"{[token for token, _ in right.top[:3]]}"
    return Difference("d2t", step.place, step.depth, text, share)


_STRANGE = 0.25  # share of a step's likeliest tokens


def _off_by(top: Top, right: Row) -> float:
    """How far the largest logits, in order, are from those they should be."""
    apart = [abs(a[1] - b[1]) for a, b in zip(top, right.top, strict=False)]
    return math.inf if any(map(math.isnan, apart)) else max(apart) / max(right.spread, 1e-9)


def _strange(top: Top, right: Row, limit: float) -> int:
    """How many of the tokens do not have the logit they should have; a reference ranks more than a trace does."""
    known, lowest, margin = dict(right.top), right.top[-1][1], limit * right.spread
    return sum(
        abs(value - known[token]) > margin if token in known else value > lowest + margin for token, value in top
    )
