"""Whether the layers that an engine captures are those that the drafter was trained on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eyas.bridges.case import Case
from eyas.bridges.report import Problem
from eyas.drafter.config import default_layer_ids

PROBE = "measure acceptance with the ids one lower, as they are, and one higher: eyas probe"


def judge(case: Case, captured: Sequence[int] | None, evidence: str) -> Iterator[Problem]:
    """``captured`` are entry ids, None where they cannot be known; ``evidence`` says by which code."""
    wanted, written = case.wanted_layers, list(case.reading.layer_ids.written)
    if captured is None or wanted is None:
        why = "" if wanted else "; the checkpoint names no layers, and this target is too shallow for the default ones"
        yield Problem(
            "undecided", f"{evidence}: the captured layers are decided at run time{why}", "they may be wrong", PROBE
        )
        return
    found = sorted(set(captured))
    said = f"{written} in {case.reading.layer_ids.key}" if written else "no ids"
    if len(found) != case.reading.config.num_aux:
        yield Problem(
            "fails",
            f"{evidence}: captures {len(found)} layers {found}, fc takes {case.reading.config.num_aux} states",
            "dies at the first forward: the states are not as wide as fc",
            "give as many distinct layer ids as fc takes states",
        )
    elif ambiguous(case):
        yield Problem(
            "undecided",
            f"{said}: the default entry ids, or output ids? {evidence} captures entry ids {found}",
            "one layer off costs a part of the acceptance, without a trace in the log",
            PROBE,
        )
    elif found != list(wanted):
        yield Problem(
            "silent",
            f"{evidence}: captures entry ids {found}; the drafter listens to {list(wanted)} ({said})",
            "the drafter is fed other states than in training: little or no acceptance, without a word in the log",
            f"write the ids as this engine reads them: eyas convert --to {case.source.name}",
        )
    elif shifted(case):
        yield Problem(
            "undecided",
            f"{said}: exactly the default layers {list(default_layer_ids(case.target.layers or 7))}, each one lower",
            "these may be output ids that were moved here without adding 1: then every state is one layer early",
            PROBE,
        )


def ambiguous(case: Case) -> bool:
    """Nested ids that equal the default entry ids: some trainers write those, most write output ids there."""
    ids, n = case.reading.layer_ids, case.target.layers or 0
    return ids.convention == "output" and n >= 7 and tuple(sorted(ids.written)) == default_layer_ids(n)


def shifted(case: Case) -> bool:
    ids, n = case.reading.layer_ids, case.target.layers or 0
    default = default_layer_ids(n) if n >= 7 else ()
    return ids.convention == "entry" and tuple(sorted(ids.written)) == tuple(i - 1 for i in default)
