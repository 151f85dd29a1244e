"""A drafter as a hypothesis reads it: as a model, and as a copy of the checkpoint that says so explicitly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.bridges.hypotheses import Hypothesis
from eyas.core import CheckpointError
from eyas.drafter import dialects, record, weights, writing
from eyas.drafter.checkpoint import Checkpoint
from eyas.drafter.config import Eagle3Config
from eyas.drafter.convert import check_free
from eyas.drafter.dialects import MAPS, Reading
from eyas.drafter.model import Eagle3Model
from eyas.drafter.weights import Entry, copied, made
from eyas.files import whole_folder, write_json

FILES = ("config.json", "model.safetensors")
_SAID = ("aux_layer_ids", "rope", "norm_before_residual", "norm_output")  # what hypotheses change, and a config says


def changed(model: Eagle3Model, hypothesis: Hypothesis) -> Eagle3Model:
    """``model`` with what the hypothesis changes; the weights are shared."""
    state = model.state_dict()
    if hypothesis.ids is not None:
        state["draft_to_target"] = torch.from_numpy(hypothesis.ids).to(model.device)
    with torch.device("meta"):
        made = Eagle3Model(hypothesis.config)
    made.load_state_dict(state, assign=True)
    return made.eval()


def write(checkpoint: Checkpoint, reading: Reading, hypothesis: Hypothesis, out: Path, force: bool = False) -> str:
    """The checkpoint as ``hypothesis`` reads it, in the new folder ``out``; returns the dialect.

    The weights keep every bit. Its own dialect if that can say it, else SGLang's or vLLM's. Raises CheckpointError
    where none of them can, or the result would not read as the hypothesis does, and UsageError where ``out`` exists.
    """
    place = out.expanduser()
    check_free(place, checkpoint.path, force, FILES)
    ids, vocab = hypothesis.ids, hypothesis.config.vocab_size
    maps = {} if ids is None else writing.vocabulary_maps(ids, vocab)
    dialect = dialect_for(hypothesis.config, reading.dialect)
    config, entries = hypothesis.config, _entries(checkpoint, reading, maps, dialect)
    verifier = (checkpoint.config.get("speculators_config") or {}).get("verifier")
    said = writing.config_json(config, dialect, weights.main_dtype(entries), verifier)
    try:
        with whole_folder(place) as folder:
            weights.write(folder / "model.safetensors", entries)
            write_json(folder / "config.json", record.carried(checkpoint.config, dialect) | said)
            again = dialects.read(Checkpoint.open(folder))
            lost = [f"another {name}" for name in _SAID if getattr(again.config, name) != getattr(config, name)]
            if why := [*again.problems, *lost]:
                raise CheckpointError(f"{place}: was not written, since it would read otherwise: {'; '.join(why)}")
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be written: {error}") from error
    return dialect


def dialect_for(config: Eagle3Config, own: str) -> str:
    """The first of its own dialect, SGLang's and vLLM's that can say this. Raises CheckpointError where none can."""
    for dialect in dict.fromkeys((own, "sglang", "vllm")):
        if not writing.cannot_say(config, dialect):
            return dialect
    raise CheckpointError(f"no dialect can say this drafter: {'; '.join(writing.cannot_say(config, 'vllm'))}")


def spelled(reading: Reading, hypothesis: Hypothesis) -> dict[str, Any]:
    """What has to stand in the drafter's config.json for the hypothesis, by key; ids in the dialect's convention."""
    dialect = dialect_for(hypothesis.config, reading.dialect)
    before = writing.config_json(reading.config, dialect, "bfloat16")
    after = writing.config_json(hypothesis.config, dialect, "bfloat16")
    return dict(_differing(before, after))


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> Any:
    for key, value in after.items():
        old = before.get(key)
        if key == "transformer_layer_config" and isinstance(old, dict):
            if inner := dict(_differing(old, value)):
                yield key, inner
        elif value != old:
            yield key, value


def _entries(
    checkpoint: Checkpoint, reading: Reading, maps: Mapping[str, np.ndarray[Any, Any]], dialect: str
) -> list[Entry]:
    kept = [name for name in reading.names if name not in MAPS]
    entries = [copied(checkpoint, reading.names[name], writing.tensor_name(name, dialect)) for name in kept]
    return entries + [made(name, values) for name, values in maps.items()]
