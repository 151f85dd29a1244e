"""Does this drafter fit this target in this engine? Everything that is wrong at once, before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eyas.bridges import architectures, known_bugs, tokenizers
from eyas.bridges.case import Case
from eyas.bridges.code.source import EngineSource, collector_paused
from eyas.bridges.report import Fact, Problem, Report
from eyas.bridges.sglang import contract as sglang
from eyas.bridges.target import Target, open_target
from eyas.bridges.vllm import contract as vllm
from eyas.core import CheckpointError
from eyas.drafter import dialects
from eyas.drafter.checkpoint import Checkpoint
from eyas.drafter.config import default_layer_ids, resolve_layer_ids
from eyas.drafter.dialects import Reading


def check(
    target: str | Path,
    drafter: str | Path,
    source: EngineSource | None,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Report:
    """``source`` None is Eyas's own engine. Raises UsageError or CheckpointError for what cannot be read at all."""
    model, checkpoint = open_target(target), Checkpoint.open(drafter)
    reading = dialects.for_target(dialects.read(checkpoint), model.layers)
    report = Report(source.label if source else "eyas", str(model.folder), str(checkpoint.path))
    report.facts += list(_facts(model, reading))
    report.problems += _pair(model, reading, checkpoint.config, source is None)
    if source is not None:
        case = Case(source, model, checkpoint, reading, flags or {}, os.environ if environment is None else environment)
        with collector_paused():
            (sglang if source.name == "sglang" else vllm).check(case, report)
            report.problems += architectures.unknown_model_type(case)
        report.problems += known_bugs.problems(case)
    report.problems += tokenizers.problems(model.folder, checkpoint.folder)
    report.problems = report.sorted_problems()
    return report


def _facts(target: Target, reading: Reading) -> Iterator[Fact]:
    text = target.text
    sizes = f"{target.layers} layers, hidden {text.get('hidden_size')}, {text.get('vocab_size')} tokens"
    yield Fact("target", f"{target.architecture or 'no architecture named'}: {sizes}")
    yield Fact("drafter", f"{', '.join(reading.architectures) or 'no architecture named'} ({reading.dialect} dialect)")
    ids = reading.layer_ids
    yield Fact(
        "listens to",
        f"entry ids {list(ids.entry)} ({list(ids.written)} in {ids.key})" if ids.entry else "the default layers",
    )


def _last_state_only(raw: Mapping[str, Any]) -> bool:
    nested = raw.get("eagle_config")
    return isinstance(nested, dict) and nested.get("use_aux_hidden_state", True) is False


def _pair(target: Target, reading: Reading, raw: Mapping[str, Any], ours: bool) -> Iterator[Problem]:
    """What is wrong whatever the engine; ``ours``: it is Eyas, whose loader is strict."""
    if ours or not reading.refused:
        first, more = reading.problems[:_MOST], len(reading.problems) - _MOST
        for text in [*first, *([f"{more} more problems of the drafter itself"] if more > 0 else [])]:
            consequence = _ENDS if ours else _MISREAD
            yield Problem(
                "fails" if ours else "silent", text, consequence, "eyas check with the drafter alone lists all"
            )
    config = reading.config
    if not ours and config.has_fc and "fc.weight" in reading.names and _last_state_only(raw):
        yield Problem(
            "silent",
            "eagle_config.use_aux_hidden_state is false: engines then feed the last state alone, and fc goes unused",
            "the drafter is fed other states than in training: little or no acceptance, without a word in the log",
            "remove the key, if the drafter was trained on several layers",
        )
    sizes = {"hidden_size": config.target_hidden_size, "vocab_size": config.vocab_size}
    for key, made_for in sizes.items():
        found = target.size(key)
        if found is not None and found != made_for:
            yield Problem(
                "fails",
                f"the drafter is made for a target of {key} {made_for}, this target's is {found}",
                _ENDS if ours else "dies at the first forward, or drafts tokens of another vocabulary",
                "take the drafter of this target",
            )
    if target.layers is None:
        yield Problem("undecided", "the target's config.json has no num_hidden_layers", "its layers cannot be checked")
        return
    try:
        resolve_layer_ids(config, target.layers)
    except CheckpointError as error:
        yield Problem(
            "fails", str(error), _ENDS if ours else "dies at the first forward", "take the drafter of this target"
        )
    if ours and not reading.layer_ids.written and target.layers >= 7:
        yield Problem(
            "note", "the checkpoint names no layers", f"entry ids {list(default_layer_ids(target.layers))} are used"
        )


_MOST = 4  # a drafter of another shape has a dozen wrong tensors for one reason
_ENDS = "Eyas refuses to load it"
_MISREAD = "the engine fails while loading, or drafts with other numbers than were trained"
