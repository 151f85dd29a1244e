"""Attention of decoding steps on a CPU: a kernel of our own, compiled on the machine where it runs.

PyTorch's attention is made for many query rows. A decoding step has a few, and its time should be that of reading keys
and values once; see ``attention.cpp``. It takes a C++ compiler, two seconds once on a machine, and nothing else. Where
it cannot be had, ``prepare`` says why, and callers stay with PyTorch's.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import struct
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from eyas.core import one_line
from eyas.target.operations import register
from eyas.target.smollm2 import build_once, cache_folder

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp")
LIBRARY, DIGEST = "a.so", "sha256"
COMPILERS = ("g++", "c++", "clang++")
TYPES = {torch.float32: 0, torch.bfloat16: 1}  # as eyas_attention numbers them
PROBLEM = struct.Struct("@5P19qd")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Unavailable(Exception):
    """The kernel cannot be used; why."""


@torch.compiler.assume_constant_result
def prepare() -> str | None:
    """None when the kernel can be used, else one sentence: why not. The first call may compile for some seconds."""
    kernel = _kernel()
    return kernel if isinstance(kernel, str) else None


def supported(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether ``torch.ops.eyas.attention`` takes these, and is there."""
    return (
        isinstance(mask, torch.Tensor)
        and query.dtype in TYPES
        and query.dtype == key.dtype == value.dtype
        and mask.dtype == torch.bool
        and query.device.type == key.device.type == value.device.type == mask.device.type == "cpu"
        and query.dim() == key.dim() == value.dim() == mask.dim() == 4
        and not _misfit(query, key, value, mask)
        and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
        and prepare() is None
    )


def _misfit(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether the shapes do not belong together, or are not of the kind that the kernel reads."""
    batch, heads, tokens, size = query.shape
    _, groups, length, _ = key.shape
    return not (
        key.shape[0] == batch
        and key.shape[3] == size
        and value.shape[:3] == key.shape[:3]
        and groups > 0
        and heads % groups == 0
        and size % 8 == 0
        and value.shape[3] % 8 == 0
        and mask.shape[0] in (1, batch)
        and mask.shape[1] == 1
        and mask.shape[2] in (1, tokens)
        and mask.shape[3] == length
        and query.stride(3) == key.stride(3) == value.stride(3) == mask.stride(3) == 1
    )


# The operation


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Softmax of query times key, times value, over the keys that ``mask`` shows; a row that sees none gives zeros.

    query [B, heads, T, D]; key [B, groups, S, D]; value [B, groups, S, E]; mask bool [B or 1, 1, T or 1, S]; all with
    contiguous rows. The result is [B, T, heads, E].
    """
    kernel = _kernel()
    if isinstance(kernel, str):
        raise RuntimeError(kernel)
    if _misfit(query, key, value, mask):
        raise ValueError("attention of tensors that do not belong together: ask supported() first")
    return _run(kernel, query, key, value, mask, scale)


def _run(
    kernel: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    batch, heads, tokens, size = query.shape
    _, groups, length, value_size = value.shape
    mask_batch, _, mask_token, _ = mask.stride()
    out = query.new_empty((batch, tokens, heads, value_size))
    kernel(
        PROBLEM.pack(
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            mask.data_ptr(),
            out.data_ptr(),
            batch,
            groups,
            heads // groups,
            tokens,
            length,
            size,
            value_size,
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            mask_batch if mask.shape[0] > 1 else 0,
            mask_token if mask.shape[2] > 1 else 0,
            TYPES[query.dtype],
            size**-0.5 if scale is None else scale,
        )
    )
    return out


def _shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))


ATTENTION = register(
    "attention(Tensor query, Tensor key, Tensor value, Tensor mask, float? scale=None) -> Tensor", _attention, _shape
)


# The kernel


@cache
def _kernel() -> Any:
    """The kernel, compiled, loaded and tried; or why there is none."""
    try:
        kernel = _load(_built())
        return _fault(kernel) or kernel
    except Unavailable as reason:
        return str(reason)
    except Exception as error:  # whatever it is, there is PyTorch's attention
        return f"the attention kernel cannot be built: {one_line(error)}"


def _built() -> Path:
    """The compiled kernel, from the cache if it is there and whole."""
    if not hasattr(os, "getuid"):
        raise Unavailable("the attention kernel is not built on this system")
    parts = (SOURCE.read_text(), *FLAGS, platform.machine(), *_processor())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    folder = cache_folder() / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    refuse_shared(folder)
    final = folder / f"attention-{key}"
    if final.is_dir():
        refuse_shared(final)
        if _whole(final):
            refuse_shared(final / LIBRARY)
            return final / LIBRARY
        shutil.rmtree(final)  # to load half a library would end the process
    build_once(final, _build, lambda _what, _done: None)
    return final / LIBRARY


def _build(_work: Path, result: Path) -> None:
    """Compiles into a folder, and tries the kernel there: what is wrong with it is not kept."""
    compiler = _compiler()
    result.chmod(0o700)  # whatever the umask: see refuse_shared
    # Linked without -fopenmp: PyTorch's OpenMP is the one to use, and a second one would bring its own threads.
    for step in ([*FLAGS, "-c", str(SOURCE), "-o", "a.o"], ["-shared", "a.o", "-o", LIBRARY]):
        made = subprocess.run([*compiler, *step], capture_output=True, text=True, timeout=300, cwd=result)
        if made.returncode:
            lines = [line for line in made.stderr.splitlines() if "error" in line] or [f"exit {made.returncode}"]
            raise Unavailable(f"the attention kernel does not compile: {compiler[0]} says {lines[0].strip()}")
    (result / "a.o").unlink()
    library = result / LIBRARY
    library.chmod(0o700)
    if fault := _fault(_load(library)):
        raise Unavailable(fault)
    (result / DIGEST).write_text(hashlib.sha256(library.read_bytes()).hexdigest())


def _whole(folder: Path) -> bool:
    try:
        return hashlib.sha256((folder / LIBRARY).read_bytes()).hexdigest() == (folder / DIGEST).read_text()
    except OSError:
        return False


def _compiler() -> list[str]:
    """The command of a C++ compiler: $CXX, or the first there is."""
    if chosen := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(chosen[0]):
            return chosen
        raise Unavailable(f"the attention kernel takes a C++ compiler, and $CXX names none: {chosen[0]}")
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise Unavailable(f"the attention kernel takes a C++ compiler, and there is none of {', '.join(COMPILERS)}")


def _processor() -> Iterator[str]:
    """What -march=native depends on: a cache may be shared by different machines."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        yield platform.processor()
        return
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    for line in cpuinfo.read_text().split("\n\n")[0].splitlines():
        name, _, values = line.partition(":")
        if name.strip() in wanted:
            yield values.strip()


def refuse_shared(path: Path) -> None:
    """Raises Unavailable for what others could have written: it would run as a part of this process."""
    path = path.resolve()
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise Unavailable(f"the attention kernel is not loaded: {path} is not this user's alone")
    for parent in path.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise Unavailable(f"the attention kernel is not loaded: everybody may write to {parent}")


def _load(library: Path) -> Any:
    try:
        kernel = ctypes.CDLL(str(library)).eyas_attention
    except OSError as error:
        raise Unavailable(f"the attention kernel cannot be loaded: {error}") from error
    kernel.argtypes, kernel.restype = [ctypes.c_char_p], None
    return kernel


def _fault(kernel: Any) -> str | None:
    """What is wrong with its results, by PyTorch's attention on a small problem of every type; None: nothing."""
    generator = torch.Generator().manual_seed(0)
    for dtype, allowed in TOLERANCE.items():
        shapes = (2, 6, 3, 24), (2, 2, 300, 24), (2, 2, 300, 40)
        query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        mask = torch.rand(2, 1, 3, 300, generator=generator) < 0.5
        keys, values = (part.float().repeat_interleave(3, dim=1) for part in (key, value))
        want = F.scaled_dot_product_attention(query.float(), keys, values, attn_mask=mask).transpose(1, 2)
        off = float((_run(kernel, query, key, value, mask).float() - want).abs().max())
        if not off <= allowed:
            return f"the attention kernel does not compute what PyTorch does here: {dtype} is off by {off:.2g}"
    return None
