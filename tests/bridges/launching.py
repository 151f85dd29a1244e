"""Engines that can be launched: miniature source for the check to read, and an actor where the entry point is."""

from __future__ import annotations

import socket
from pathlib import Path

from bridges import actor
from bridges.engines import SGLANG, VLLM, WRAPPER, write

ENTRY = {"sglang": "sglang__launch_server", "vllm": "vllm__entrypoints__cli__main"}


def engine(folder: Path, name: str) -> Path:
    """Put it on PYTHONPATH, and any Python has this engine installed."""
    more = {"sglang__srt__models__wrapper": WRAPPER} if name == "sglang" else {}
    write(folder, {"sglang": SGLANG, "vllm": VLLM}[name], **more)
    about = folder / f"{name}-0.7.1.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.7.1\n")
    (about / "RECORD").write_text(f"{name}/__init__.py,,\n")
    script = folder / f"{ENTRY[name].replace('__', '/')}.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(Path(actor.__file__).read_text())
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
