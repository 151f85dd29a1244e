"""Bugs of released versions that the contract cannot show: the one place where a version number decides."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from eyas.bridges.case import Case
from eyas.bridges.report import Problem, Severity

_SGLANG, _VLLM = "https://github.com/sgl-project/sglang/", "https://github.com/vllm-project/vllm/"


@dataclass(frozen=True)
class KnownBug:
    """``first``: the earliest release it was seen in; ``fixed``: the earliest that is known to be without it."""

    engine: str
    first: tuple[int, ...]
    fixed: tuple[int, ...] | None
    issue: str
    applies: Callable[[Case], bool]
    severity: Severity
    what: str
    consequence: str
    fix: str


def _architecture(pattern: str) -> Callable[[Case], bool]:
    return lambda case: bool(re.search(pattern, case.target.architecture))


def _tree(case: Case) -> bool:
    topk = case.flags.get("speculative_eagle_topk")
    return isinstance(topk, int) and topk > 1


def _has_triton(case: Case) -> bool:
    return not case.source.requires("torch").endswith("+cpu")


BUGS = (
    KnownBug(
        "sglang", (0,), None, _SGLANG + "issues/34152", _architecture("^Qwen3VL"), "note",
        "Qwen3-VL with EAGLE-3: too few multi-axis positions for a batch of drafts",
        "single requests work, batched traffic dies with an illegal memory access",
        "try batched traffic before you rely on it",
    ),
    KnownBug(
        "sglang", (0, 5, 12), (0, 5, 23), _SGLANG + "pull/38307", _architecture("^Qwen3_5(Moe)?ForCond"), "fails",
        "Qwen3.5 under its vision wrapper: the layers are set, but not marked on the decoder layers",
        "dies at graph capture: too many values to unpack (expected 2)",
        "apply the pull request, or take SGLang 0.5.23",
    ),
    KnownBug(
        "sglang", (0,), (0, 5, 23), _SGLANG + "issues/24402", _tree, "note",
        "draft trees (top-k above 1) have met an illegal memory access under load",
        "the server dies under traffic",
        "--speculative-eagle-topk 1 is the safe choice",
    ),
    KnownBug(
        "sglang", (0,), None, _SGLANG + "issues/22780", _architecture("^KimiK25"), "note",
        "Kimi-K2.5: the draft worker flips a flag of chunked prefix attention that the target shares",
        "an assertion when the KV cache is full",
        "leave head-room: a lower --mem-fraction-static or --max-running-requests",
    ),
    KnownBug(
        "vllm", (0, 29), None, _VLLM + "issues/40551", _has_triton, "note",
        "the V2 model runner has shown a lower acceptance length than V1 with the same drafter",
        "a few per cent of acceptance",
        "compare with VLLM_USE_V2_MODEL_RUNNER=0 before you blame the drafter",
    ),
)  # fmt: skip


def problems(case: Case) -> Iterator[Problem]:
    release = case.source.release
    if release is None:
        yield Problem("note", f"the version of {case.source.name} cannot be told", "its known bugs cannot be looked up")
        return
    for bug in BUGS:
        ours = bug.engine == case.source.name and bug.first <= release and (bug.fixed is None or release < bug.fixed)
        if ours and bug.applies(case):
            yield Problem(
                bug.severity, f"known bug of {case.source.label}: {bug.what}", bug.consequence, bug.fix, bug.issue
            )
