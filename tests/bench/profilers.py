"""What the published sources of engines say of their profilers, as far as it is read."""

from __future__ import annotations

from pathlib import Path

CONFIG = """
class ProfilerConfig:
    profiler: str | None = None
    torch_profiler_dir: str = ""
    torch_profiler_with_stack: bool = True
    ignore_frontend: bool = False
    delay_iterations: int = 0
    max_iterations: int = 0
"""
ENVS = (
    'x = {"VLLM_TORCH_PROFILER_DIR": 1, "VLLM_TORCH_PROFILER_WITH_STACK": 2, "VLLM_TORCH_PROFILER_RECORD_SHAPES": 3}\n'
)


def with_config(place: Path) -> Path:
    """A vLLM of today."""
    (place / "vllm" / "config").mkdir(exist_ok=True)
    (place / "vllm" / "config" / "profiler.py").write_text(CONFIG)
    return place


def with_variables(place: Path) -> Path:
    """One of 2025."""
    (place / "vllm" / "envs.py").write_text(ENVS)
    return place
