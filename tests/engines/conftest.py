"""The real vLLM on CPU, as every test here starts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugin import environments

QUICK = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture(scope="session")
def python() -> Path:
    return environments.vllm()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test starts inherits it."""
    for name, value in QUICK.items():
        monkeypatch.setenv(name, value)
