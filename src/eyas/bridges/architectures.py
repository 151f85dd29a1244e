"""Architectures that an engine does not register, and model types that it cannot read."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from eyas.bridges.case import Case
from eyas.bridges.report import Problem


def unknown_target(case: Case) -> Problem:
    named, engine = case.target.architecture or "(none)", case.source
    return Problem(
        "fails",
        f"config.json names the architecture {named}; {engine.label} registers none such",
        "dies before loading, or runs without the EAGLE-3 interface where it falls back to transformers' own modules",
        f"take a {engine.name} that has it: eyas check --matrix lists what this one has",
    )


def unknown_drafter(case: Case, named: str) -> Problem:
    return Problem(
        "fails",
        f"{case.source.label} looks for the drafter's architecture {named or '(none)'}, and registers none such",
        "dies at the start, or once the target's weights are loaded",
        f"eyas convert --to {case.source.name}",
    )


def no_model_type(case: Case) -> Problem:
    kind = " (it is a speculators config)" if case.reading.dialect == "vllm" else ""
    return Problem(
        "fails",
        f"the drafter's config.json has no model_type{kind}",
        "dies at the start: transformers cannot tell which config class it is",
        f"eyas convert --to {case.source.name}",
    )


def unknown_model_type(case: Case) -> Iterator[Problem]:
    """A drafter's model_type that neither the engine's source nor the transformers installed here knows."""
    raw, engine = case.checkpoint.config, case.source
    kind = raw.get("model_type")
    foreign = {"auto_map", "speculators_config", "speculators_model_type"}  # read by code of their own
    if "model_type" not in raw or foreign & raw.keys() or (isinstance(kind, str) and _is_known(case, kind)):
        return
    yield Problem(
        "fails",
        f"{case.checkpoint.folder / 'config.json'} has model_type {kind!r}, which neither transformers nor "
        f"{engine.label} knows",
        "dies at the start: transformers cannot tell which config class it is",
        'write the model_type of its layers into config.json: "llama" for an EAGLE-3 drafter of Llama layers',
    )


def _is_known(case: Case, kind: str) -> bool:
    spec = importlib.util.find_spec("transformers")
    folder = Path(spec.origin).parent / "models" / "auto" if spec and spec.origin else Path()
    files = [folder / name for name in ("configuration_auto.py", "auto_mappings.py")]
    if any(f'("{kind}", ' in file.read_text(encoding="utf-8") for file in files if file.is_file()):
        return True
    # of a config class, or as the key of a table of them
    spelled = (f'model_type = "{kind}"', f'model_type: str = "{kind}"', f'"{kind}":', f'{kind}="')
    return bool(kind) and any(case.source.containing(spelled).values())
