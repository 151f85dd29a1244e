"""Where numbers come from: command, versions, commit, hardware; and what a drafter's training took."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import eyas

PACKAGES = ("torch", "transformers", "numpy", "scipy", "httpx")
SECRET = ("key", "token", "password", "launch_command")  # ends of names whose values nobody else needs to know


def provenance(command: Sequence[str]) -> dict[str, Any]:
    """Of this process and the machine it runs on."""
    return {
        "command": no_secrets(command),
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "eyas": eyas.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "client": hardware(),
    }


def hardware() -> dict[str, Any]:
    import psutil

    found: dict[str, Any] = {
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    torch = sys.modules.get("torch")  # if it is not loaded, nothing here runs on a GPU
    if torch is not None:
        found["threads"] = torch.get_num_threads()
        if torch.cuda.is_available():
            found["gpus"] = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return found


def commit() -> str | None:
    """Of the checkout that Eyas runs from, with a + where files differ from it; None where it is installed."""
    where = Path(eyas.__file__).parent
    try:
        head = _git(where, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(where, "status", "--porcelain", "--untracked-files=no", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def training_seconds(drafter: Path) -> float | None:
    """How long ``eyas train`` took for this drafter, from its log; None where there is none."""
    from eyas.training.trainer import KEPT, LOG

    try:
        lines = (drafter / KEPT / LOG).read_text(encoding="utf-8").splitlines()
        return float(json.loads(lines[-1])["seconds"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None


def _git(where: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(where), *arguments], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def no_secrets(command: Sequence[str]) -> list[str]:
    """A command line without keys and passwords, in addresses too: results are passed on."""
    found, hidden = list[str](), False
    for part in command:
        name, equals, _ = part.partition("=")
        if part.startswith("-"):
            secret = name.lower().endswith(SECRET)
            hidden = secret and not equals
            found.append(f"{name}=***" if secret and equals else no_password(part))
        else:
            found.append("***" if hidden else no_password(part))
    return found


def no_password(text: str) -> str:
    """An address without who asks there."""
    scheme, mark, rest = text.partition("://")
    if not mark or "@" not in rest.partition("/")[0]:
        return text
    return f"{scheme}://{rest.partition('@')[2]}"
