"""Who holds a port or a GPU that a server is to use: mostly an earlier run of it."""

from __future__ import annotations

import csv
import datetime
import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from eyas.bridges.following import Address, describe
from eyas.core import EyasError

_SMI = "nvidia-smi"
_EVERYWHERE = ("", "0.0.0.0", "::")


@dataclass(frozen=True)
class Holder:
    """``process`` says which one, "4711 (python -m vllm ...), since 11-30 08:12". ``pid`` None: the system hides it."""

    pid: int | None
    process: str


def holder(pid: int | None) -> Holder:
    if pid is None:
        return Holder(None, "a process of another user or container")
    try:
        process = psutil.Process(pid)
        since = datetime.datetime.fromtimestamp(process.create_time()).strftime("%m-%d %H:%M")
        orphan = ", left over: its parent has ended" if process.ppid() == 1 and pid != 1 else ""
        return Holder(pid, f"{describe(process)}, since {since}{orphan}")
    except psutil.NoSuchProcess:
        return Holder(None, f"{pid}, a process outside this container")


def check_port(address: Address, bound: str) -> None:
    """Raises EyasError where nobody can listen at ``bound`` ("" is every interface), and says who does already."""
    listening = [
        c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr[1] == address.port
    ]
    same = {*_EVERYWHERE, bound, address.host, *_resolved(bound)}
    pids = {c.pid for c in listening if bound in _EVERYWHERE or c.laddr[0] in same}
    if pids:
        found = [holder(pid) for pid in sorted(pids, key=lambda pid: pid or 0)]
        raise EyasError(
            f"port {address.port} is held by {said(found)}. {remedy(found)}, or take another one with --port"
        )
    try:
        family = socket.AF_INET6 if ":" in bound else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((bound, address.port))
    except OSError as error:
        raise EyasError(
            f"nobody can listen at {bound or 'port'} {address.port}: {error}; take another --port"
        ) from error


def _resolved(name: str) -> set[str]:
    """The addresses of a name such as localhost; what is no name shows when it is listened at."""
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(name or None, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()


def free_port() -> int:
    """One of 127.0.0.1 that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Gpu:
    index: str
    uuid: str


def check_gpus(positions: Sequence[int], environment: Mapping[str, str]) -> None:
    """Raises EyasError where processes compute on the GPUs that an engine would take, and names them.

    ``positions`` count what CUDA_VISIBLE_DEVICES leaves. Nothing is known, and nothing raised, without nvidia-smi.
    """
    if not positions or shutil.which(_SMI) is None:
        return
    gpus = [Gpu(*row) for row in _smi("--query-gpu=index,uuid")]
    visible = _visible(gpus, environment.get("CUDA_VISIBLE_DEVICES"))
    used = {gpu.uuid: gpu for place, gpu in enumerate(visible) if place in positions}
    found = [
        (used[uuid], holder(int(pid)), memory)
        for uuid, pid, memory in _smi("--query-compute-apps=gpu_uuid,pid,used_memory")
        if uuid in used
    ]
    if not found:
        return
    each = "; ".join(f"GPU {gpu.index} is held by {who.process}{_gib(memory)}" for gpu, who, memory in found)
    raise EyasError(
        f"{each}. {remedy([who for _, who, _ in found])}, choose other GPUs with CUDA_VISIBLE_DEVICES, or share them "
        "with --share-gpus"
    )


def _visible(gpus: Sequence[Gpu], said: str | None) -> list[Gpu]:
    if said is None:
        return list(gpus)
    found = []
    for name in (part.strip() for part in said.split(",")):
        gpu = next((g for g in gpus if name == g.index or (name.startswith("GPU-") and g.uuid.startswith(name))), None)
        if gpu is None:  # CUDA itself stops at the first one that it does not find
            break
        found.append(gpu)
    return found


def _smi(query: str) -> list[list[str]]:
    """Rows of what nvidia-smi answers. Raises EyasError where it fails."""
    command = [_SMI, query, "--format=csv,noheader,nounits"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EyasError(f"{' '.join(command)}: {error}; --share-gpus does not look at them") from error
    if ran.returncode:
        why = " ".join((ran.stdout + ran.stderr).split())
        raise EyasError(f"{' '.join(command)} fails: {why}; --share-gpus does not look at them")
    return [row for row in csv.reader(ran.stdout.splitlines(), skipinitialspace=True) if row]


def _gib(memory: str) -> str:
    return f" ({int(memory) / 1024:.1f} GiB)" if memory.isdigit() else ""  # [N/A] where the driver does not tell


def said(holders: Iterable[Holder]) -> str:
    return " and ".join(f"process {one.process}" if one.pid else one.process for one in holders)


def remedy(holders: Iterable[Holder]) -> str:
    pids = list(dict.fromkeys(str(one.pid) for one in holders if one.pid))
    return f"End it (kill {' '.join(pids)})" if pids else "End it"
