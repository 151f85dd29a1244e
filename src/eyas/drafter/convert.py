"""A drafter from one dialect to another: other names, another config, and every bit of its weights as it was."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eyas.core import CheckpointError, EyasError, UsageError
from eyas.drafter import dialects, engines, record, vocabulary, weights, writing
from eyas.drafter.checkpoint import Checkpoint, refusal
from eyas.drafter.config import Eagle3Config, default_layer_ids
from eyas.drafter.dialects import MAPS, Reading
from eyas.drafter.engines import ReadSource
from eyas.drafter.inspect import odd_layer_ids
from eyas.drafter.record import Change
from eyas.drafter.verifier import Verifier
from eyas.drafter.weights import Entry, copied, made
from eyas.files import whole_folder, write_json

_FILES = ("config.json", "model.safetensors", record.NAME)
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


@dataclass(frozen=True)
class Conversion:
    """What ``convert`` did: ``changes`` is all that reads differently now, ``notes`` what to know of the result."""

    source: Path
    out: Path
    dialects: tuple[str, str]  # from, to
    tensors: int
    nbytes: int
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    d2t_sha256: str | None  # of the int64 offsets: the vocabulary that a fine-tune of this drafter must keep


@dataclass(frozen=True)
class _Plan:
    """The destination, before anything is written: its tensors are copies of ``sources`` (new name to the source's) or
    ``made`` here.
    """

    config: Eagle3Config
    sources: dict[str, str]
    made: dict[str, np.ndarray[Any, Any]]
    dropped: dict[str, str]
    d2t_sha256: str | None
    reordered: bool


def convert(
    source: str | Path,
    dialect: str,
    out: str | Path,
    *,
    target: Verifier | None = None,
    engine: ReadSource | None = None,
    force: bool = False,
) -> Conversion:
    """Writes the drafter at ``source`` to the new folder ``out`` as ``dialect`` ("eagle", "sglang", "vllm") spells it.

    ``target`` lets max_position_embeddings grow to what the target reaches, names it in a speculators config, and tells
    whether explicit layer ids are the default. ``engine`` reads the source of the engine that is to load the result:
    older ones know less than their dialect. The result holds a record of where every value came from.

    Raises CheckpointError where the source is unsound, or the destination would compute something else (all reasons at
    once), and UsageError where ``out`` exists; ``force`` replaces an earlier conversion, and only that.
    """
    if dialect not in writing.DIALECTS:
        raise UsageError(f"there is no dialect {dialect!r}; convert to one of {', '.join(writing.DIALECTS)}")
    checkpoint, place = Checkpoint.open(source), Path(out).expanduser()
    check_free(place, checkpoint.path, force, _FILES)
    reading = dialects.for_target(dialects.read(checkpoint), target.num_hidden_layers if target else None)
    problems = [*reading.problems, *(target.mismatches(reading.config) if target else ())]
    if problems:
        raise refusal(checkpoint.path, problems)
    plan = _plan(checkpoint, reading, dialect, target)
    if reasons := _losses(plan, dialect, engine):
        raise refusal(checkpoint.path, reasons, f"this drafter cannot be written for {dialect}")
    try:
        with whole_folder(place) as folder:
            changes = _write(checkpoint, reading, plan, folder, target)
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be written: {error}") from error
    return Conversion(
        source=checkpoint.path,
        out=place,
        dialects=(reading.dialect, dialect),
        tensors=len(plan.sources) + len(plan.made),
        nbytes=sum(entry.nbytes for entry in _entries(checkpoint, plan)),
        changes=changes,
        notes=tuple(_notes(checkpoint, reading, plan.config, target)),
        d2t_sha256=plan.d2t_sha256,
    )


def losses(checkpoint: Checkpoint, reading: Reading, dialect: str, engine: ReadSource) -> list[str]:
    """What ``dialect``, or the engine that is to load it, would compute differently: why ``convert`` would refuse.

    ``reading`` is a sound one. Raises UsageError for an engine that cannot run any such drafter.
    """
    return _losses(_plan(checkpoint, reading, dialect, None), dialect, engine)


def _losses(plan: _Plan, dialect: str, engine: ReadSource | None) -> list[str]:
    found = writing.cannot_say(plan.config, dialect, plan.reordered)
    return engines.limits(plan.config, dialect, engine) if engine and not found else found


def check_free(out: Path, source: Path, force: bool, ours: Collection[str]) -> None:
    """Raises UsageError where writing ``out`` would lose something: only a folder of the files ``ours`` is replaced."""
    if source.resolve() == out.resolve() or out.resolve() in source.resolve().parents:
        raise UsageError(f"{out}: holds the source; name another folder")
    if not out.is_dir():
        if out.exists() or out.is_symlink():
            raise UsageError(f"{out}: exists and is not a folder")
        return
    held = sorted(path.name for path in out.iterdir())
    foreign = [name for name in held if name not in ours]
    if foreign:
        raise UsageError(f"{out}: holds {foreign[0]}, which is not of a conversion; empty it or name another folder")
    if held and not force:
        raise UsageError(f"{out}: exists already; --force replaces it")


def _plan(checkpoint: Checkpoint, reading: Reading, dialect: str, target: Verifier | None) -> _Plan:
    config, names = _destination(reading.config, dialect, target), reading.names
    sources = {writing.tensor_name(name, dialect): names[name] for name in names if name not in MAPS}
    if config.own_head and not reading.config.own_head:
        sources[_HEAD] = names[_EMBEDDING]
    maps, digest = _maps(checkpoint, reading), None
    dropped = {name: "a buffer, not a weight" for name in checkpoint.tensors if name not in names.values()}
    if maps:
        sources |= {name: names[name] for name in MAPS if name in names}
        digest = hashlib.sha256(maps["d2t"].astype("<i8").tobytes()).hexdigest()
    else:
        why = "the draft vocabulary is the target's: it maps every token to itself"
        dropped |= {names[name]: why for name in MAPS if name in names}
    made = {name: values for name, values in maps.items() if name not in names}
    reordered = bool(maps) and config.draft_vocab_size == config.vocab_size
    return _Plan(config, sources, made, dropped, digest, reordered)


def _destination(config: Eagle3Config, dialect: str, target: Verifier | None) -> Eagle3Config:
    """The same drafter as ``dialect`` can say it, as far as nothing that is computed depends on the difference."""
    changed: dict[str, Any] = {"dialect": dialect}
    if target and target.max_position_embeddings > config.max_position_embeddings:
        changed["max_position_embeddings"] = target.max_position_embeddings
    if config.tied_head and config.own_embedding and dialect != "sglang":  # only SGLang ties: say it with a copy
        changed |= {"tied_head": False, "own_head": True}
    if dialect == "eagle" and target and _is_default(config, target.num_hidden_layers):
        changed["aux_layer_ids"] = None
    return replace(config, **changed)


def _is_default(config: Eagle3Config, num_target_layers: int) -> bool:
    return num_target_layers >= 7 and config.aux_layer_ids == default_layer_ids(num_target_layers)


def _maps(checkpoint: Checkpoint, reading: Reading) -> dict[str, np.ndarray[Any, Any]]:
    """d2t and t2d where they say something, whatever the files hold."""
    if "d2t" not in reading.names:
        return {}
    ids = vocabulary.ids_from_offsets(checkpoint.array(reading.names["d2t"]))
    return writing.vocabulary_maps(ids, reading.config.vocab_size)


def _entries(checkpoint: Checkpoint, plan: _Plan) -> list[Entry]:
    kept = [copied(checkpoint, original, name) for name, original in plan.sources.items()]
    return kept + [made(name, values) for name, values in plan.made.items()]


def _write(
    checkpoint: Checkpoint, reading: Reading, plan: _Plan, folder: Path, target: Verifier | None
) -> tuple[Change, ...]:
    """Config, weights and record, read again before they are taken for good: engines drop silently, Eyas does not."""
    dialect, entries = plan.config.dialect, _entries(checkpoint, plan)
    config = writing.config_json(
        plan.config, dialect, weights.main_dtype(entries), _verifier(checkpoint.config, target)
    )
    write_json(folder / "config.json", record.carried(checkpoint.config, dialect) | config)
    digests = weights.write(folder / "model.safetensors", entries)
    written = Checkpoint.open(folder)
    again = dialects.read(written)
    if again.problems or again.config != plan.config:
        raise EyasError(
            f"{checkpoint.path}: the result would not be the same drafter ({again.problems or again.config}); nothing "
            "was written. This is a bug in Eyas: please report it with the drafter's config.json"
        )
    tensors = {name: record.origin(checkpoint, plan.sources.get(name)) | {"sha256": digests[name]} for name in digests}
    rest = {"tensors": tensors, "dropped": plan.dropped, "d2t_sha256": plan.d2t_sha256}
    write_json(folder / record.NAME, record.provenance(checkpoint, reading, written, target) | rest)
    return record.changes(checkpoint, reading, written, again)


def _verifier(raw: Mapping[str, Any], target: Verifier | None) -> Mapping[str, Any] | None:
    if target:
        return {"name_or_path": target.name, "architectures": list(target.architectures)}
    said = raw.get("speculators_config")
    return said.get("verifier") if isinstance(said, dict) and isinstance(said.get("verifier"), dict) else None


def _notes(checkpoint: Checkpoint, reading: Reading, config: Eagle3Config, target: Verifier | None) -> list[str]:
    nameless = config.dialect == "vllm" and not (_verifier(checkpoint.config, target) or {}).get("name_or_path")
    notes = [
        (
            config.dialect == "sglang" and config.own_embedding and config.hidden_size == config.target_hidden_size,
            "SGLang will use the target's embedding in place of embed_tokens.weight: the same where the drafter's is a "
            "copy, as it mostly is",
        ),
        (
            target is None and config.max_position_embeddings <= 2048,
            f"max_position_embeddings stays {config.max_position_embeddings}: engines that size their rotary table by "
            "it fail or degrade on longer prompts; name the target to raise it",
        ),
        (
            nameless,
            "the config names no target: `vllm serve` needs the target and a --speculative-config with this drafter",
        ),
    ]
    return [*odd_layer_ids(checkpoint.config, reading), *(note for applies, note in notes if applies)]
