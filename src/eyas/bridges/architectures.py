"""Architectures that an engine does not register."""

from __future__ import annotations

from eyas.bridges.case import Case
from eyas.bridges.report import Problem


def unknown_target(case: Case) -> Problem:
    named, engine = case.target.architecture or "(none)", case.source
    return Problem(
        "fails",
        f"config.json names the architecture {named}; {engine.label} registers none such",
        "dies before loading, or falls back to transformers' own modules, which have no EAGLE-3 interface",
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
