"""Who holds a port or a GPU."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from eyas.bridges import holders
from eyas.bridges.following import Address
from eyas.bridges.holders import check_gpus, check_port, free_port
from eyas.core import EyasError

# As nvidia-smi --format=csv,noheader,nounits answers.
GPUS = "0, GPU-aaaa-1\n1, GPU-bbbb-2\n2, GPU-cccc-3\n"


def test_a_free_port():
    check_port(Address("127.0.0.1", free_port()), "")


@pytest.mark.parametrize("bound", ["", "0.0.0.0", "127.0.0.1", "localhost"])
def test_a_port_that_is_held(bound):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(EyasError) as error:
            check_port(Address("127.0.0.1", port), bound)
    said = str(error.value)
    assert f"port {port} is held by process {os.getpid()} (" in said and "python" in said and ", since " in said
    assert f"End it (kill {os.getpid()}), or take another one with --port" in said


def test_a_port_of_another_interface():
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_port(Address("127.0.0.2", server.getsockname()[1]), "127.0.0.2")


def test_an_address_of_nobody():
    with pytest.raises(EyasError, match=r"nobody can listen at 203\.0\.113\.9 \d+: .*; take another --port"):
        check_port(Address("203.0.113.9", free_port()), "203.0.113.9")


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def say(apps: str, code: int = 0) -> None:
        script = tmp_path / "nvidia-smi"
        script.write_text(
            f"#!/bin/sh\n[ {code} = 0 ] || {{ echo 'NVML: Driver/library version mismatch'; exit {code}; }}\n"
            f"case $1 in --query-gpu=index,uuid) printf '{GPUS}';; *) printf '{apps}';; esac\n"
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return say


def test_without_nvidia_smi(monkeypatch):
    monkeypatch.setattr(holders, "_SMI", "no-such-program-as-nvidia-smi")
    check_gpus([0, 1], {})


def test_free_gpus(smi):
    smi("")
    check_gpus([0, 1, 2], {})


def test_gpus_that_are_held(smi):
    smi(f"GPU-bbbb-2, {os.getpid()}, 125829\nGPU-cccc-3, 4194304, [N/A]\n")
    check_gpus([0], {})
    with pytest.raises(EyasError) as error:
        check_gpus([0, 1, 2], {})
    said = str(error.value)
    assert (
        f"GPU 1 is held by {os.getpid()} (" in said and "(122.9 GiB); GPU 2 is held by 4194304, a process out" in said
    )
    assert f"End it (kill {os.getpid()}), choose other GPUs with CUDA_VISIBLE_DEVICES, or share them" in said


@pytest.mark.parametrize(
    ("visible", "positions", "held"),
    [("1,0", [0], True), ("1,0", [1], False), ("GPU-bbbb", [0], True), ("", [0], False), ("0,9,1", [0, 1, 2], False)],
)
def test_those_that_are_visible(smi, visible, positions, held):
    smi(f"GPU-bbbb-2, {os.getpid()}, 10\n")
    if held:
        with pytest.raises(EyasError, match="GPU 1 is held by"):
            check_gpus(positions, {"CUDA_VISIBLE_DEVICES": visible})
    else:
        check_gpus(positions, {"CUDA_VISIBLE_DEVICES": visible})


def test_a_driver_that_fails(smi):
    smi("", code=18)
    with pytest.raises(EyasError, match="fails: NVML: Driver/library version mismatch; --share-gpus does not look"):
        check_gpus([0], {})
