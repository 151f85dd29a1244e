"""Other ways to read a drafter's checkpoint, each a changed config or tensor: what trainers and converters mix up.

Each is a pure function from what was read to a reading, or to the reason why there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from eyas.drafter import vocabulary
from eyas.drafter.checkpoint import Checkpoint
from eyas.drafter.config import Eagle3Config, resolve_layer_ids
from eyas.drafter.dialects import Reading

AS_READ = "as read"


@dataclass(frozen=True)
class Hypothesis:
    """``config`` with resolved layer ids; ``ids`` int64 [D], the target's id of each draft token, None: unchanged.

    ``meaning``: what went wrong if it is right; ``stage``: where a trace of an engine that reads the checkpoint as it
    is then differs (trace.STAGES).
    """

    name: str
    meaning: str
    config: Eagle3Config
    stage: str = ""
    ids: vocabulary.Ids | None = None


@dataclass(frozen=True)
class Facts:
    """What the target and the checkpoint's maps say."""

    layers: int
    rope: Mapping[str, Any]
    maps: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)


def as_read(checkpoint: Checkpoint, reading: Reading, layers: int) -> Hypothesis:
    """What the checkpoint says. Raises CheckpointError where its layers are not the target's."""
    config = replace(reading.config, aux_layer_ids=resolve_layer_ids(reading.config, layers))
    d2t = maps_of(checkpoint, reading).get("d2t")
    return Hypothesis(AS_READ, "", config, ids=None if d2t is None else vocabulary.ids_from_offsets(d2t))


def maps_of(checkpoint: Checkpoint, reading: Reading) -> dict[str, np.ndarray[Any, Any]]:
    """d2t and t2d as far as the checkpoint has them, sound or not."""
    return {name: checkpoint.array(reading.names[name]) for name in ("d2t", "t2d") if name in reading.names}


def others(read: Hypothesis, known: Facts) -> Iterator[Hypothesis | str]:
    """Every other reading; a sentence where a shift leaves the target."""
    yield shifted(read, -1, known.layers)
    yield shifted(read, 1, known.layers)
    made = (
        offsets_are_ids(read, known.maps.get("d2t")),
        ids_from_mask(read, known.maps.get("t2d")),
        rope_of_target(read, known.rope),
        normed_residual(read),
        normed_output(read),
    )
    yield from (hypothesis for hypothesis in made if hypothesis is not None)


def shifted(read: Hypothesis, by: int, layers: int) -> Hypothesis | str:
    """All layer ids moved by one: entry and output ids taken for one another."""
    ids = tuple(i + by for i in read.config.aux_layer_ids or ())
    if min(ids) < 0 or max(ids) > layers:
        return f"shift {by:+d} was left out: entry ids {list(ids)} are not all within 0..{layers}"
    what = "output ids that were taken for entry ids" if by > 0 else "entry ids that were taken for output ids"
    config = replace(read.config, aux_layer_ids=ids)
    return replace(read, name=f"shift {by:+d}", meaning=f"its layer ids are {what}", stage="states", config=config)


def offsets_are_ids(read: Hypothesis, d2t: np.ndarray[Any, Any] | None) -> Hypothesis | None:
    """d2t holds the target's ids themselves."""
    if d2t is None or vocabulary.problems(
        vocabulary.offsets_from_ids(d2t), None, read.config.draft_vocab_size, read.config.vocab_size
    ):
        return None
    meaning = "its d2t holds target ids, where engines read offsets from the draft id"
    return replace(read, name="d2t as ids", meaning=meaning, stage="d2t", ids=np.asarray(d2t, dtype=np.int64))


def ids_from_mask(read: Hypothesis, t2d: np.ndarray[Any, Any] | None) -> Hypothesis | None:
    """The draft vocabulary that t2d names, in ascending order, where d2t says another or nothing."""
    members = np.flatnonzero(t2d) if t2d is not None else np.empty(0)
    same = read.ids is not None and np.array_equal(members, read.ids)
    if len(members) != read.config.draft_vocab_size or same:
        return None
    meaning = "its d2t is missing, damaged or of another drafter; t2d names the draft vocabulary"
    return replace(read, name="d2t from t2d", meaning=meaning, stage="d2t", ids=members.astype(np.int64))


def rope_of_target(read: Hypothesis, rope: Mapping[str, Any]) -> Hypothesis | None:
    if dict(rope) == dict(read.config.rope) or replace(read.config, rope=rope).problems():
        return None
    meaning = "its config lost the RoPE that it was trained with, which is the target's"
    config = replace(read.config, rope=dict(rope))
    return replace(read, name="RoPE of the target", meaning=meaning, stage="rope", config=config)


def normed_residual(read: Hypothesis) -> Hypothesis:
    value = not read.config.norm_before_residual
    meaning = f"norm_before_residual is {str(value).lower()} in the model that was trained"
    name, config = f"norm_before_residual {str(value).lower()}", replace(read.config, norm_before_residual=value)
    return replace(read, name=name, meaning=meaning, stage="layer", config=config)


def normed_output(read: Hypothesis) -> Hypothesis:
    value = not read.config.norm_output
    handed = "after" if value else "before"
    meaning = f"the state {handed} the final norm is handed to the next drafted token"
    name, config = f"norm_output {str(value).lower()}", replace(read.config, norm_output=value)
    return replace(read, name=name, meaning=meaning, stage="carried", config=config)
