"""``eyas launch`` in the real vLLM on CPU, whose environment $EYAS_VLLM_PYTHON names: minutes, so `make test-engines`.

Every bad end, drafters that vLLM refuses or misreads, a wrapper that it has no EAGLE-3 for, and SmolLM2 with a drafter
that comes in SGLang's dialect. An engine that was started for something else also shows how it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from model_files import tiny_llama, tiny_tokenizer
from safetensors.torch import load_file, save_file
from transformers import Qwen2AudioConfig, Qwen2AudioEncoderConfig, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder

from eyas.bridges.following import Address, Ended, Ready, Server
from eyas.bridges.holders import free_port
from eyas.bridges.metrics import Speculation, from_stats
from eyas.bridges.vllm import launch as vllm
from eyas.bridges.vllm.metrics import from_prometheus
from eyas.drafter import dialects, storage
from eyas.drafter.checkpoint import Checkpoint
from eyas.drafter.convert import convert
from eyas.drafter.dialects import MAPS
from eyas.drafter.model import Eagle3Model, untrained
from eyas.drafter.shipped import shipped_drafter
from eyas.drafter.verifier import Verifier

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

START = 1200  # seconds that a server has to be ready: a minute, unless the machine is busy
EAGER = ("--enforce-eager", "--dtype", "float32", "--host", "127.0.0.1")
DRAFT, TOKENS = 3, 88  # at an acceptance length of 1.9 that is 6,000 drafts on the 132 prompts held out
TWO_POINTS = 0.02


class Launched:
    """``eyas launch --json`` as a process; its events are read as they come."""

    def __init__(self, python: Path, target: Path, drafter: Path, log: Path, *arguments: str, cache: Path):
        self.log = log
        command = [sys.executable, "-m", "eyas", "launch", "--engine", "vllm", str(target), "--drafter", str(drafter)]
        command += ["--engine-python", str(python), "--json", "--log", str(log), *arguments]
        environment = {**os.environ, "EYAS_CACHE": str(cache)}
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.events: list[dict[str, Any]] = []
        self.family: set[psutil.Process] = set()  # whatever was ever seen below it
        self._arrived = threading.Condition()
        self._readers = [threading.Thread(target=self._read), threading.Thread(target=self._drain)]
        threading.Thread(target=self._watch, daemon=True).start()
        self.err = b""
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._arrived:
                self.events.append(json.loads(line))
                self._arrived.notify_all()

    def _drain(self) -> None:
        assert self.process.stderr is not None
        self.err = self.process.stderr.read()

    def _watch(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.process.pid)
            while self.process.poll() is None:
                self.family |= set(launcher.children(recursive=True))
                time.sleep(0.5)

    def left(self) -> list[psutil.Process]:
        """What still runs of it."""
        return [process for process in self.family if process.is_running() and not _is_zombie(process)]

    def event(self, name: str, seconds: float = START) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        with self._arrived:
            while not (found := [event for event in self.events if event["event"] == name]):
                left = deadline - time.monotonic()
                ended = self.process.poll() is not None and not self._readers[0].is_alive()
                assert left > 0 and not ended, f"no {name}: {self.events}\n{self.err.decode()}\n{self.tail()}"
                self._arrived.wait(min(left, 1.0))
        return found[0]

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""

    def wait(self, seconds: float = 60) -> int:
        code = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(10)
        return code

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # the second one kills the engine
            with contextlib.suppress(subprocess.TimeoutExpired):
                if self.process.poll() is None:
                    self.process.send_signal(number)
                self.wait(30)
                return


def _is_zombie(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


@pytest.fixture
def launch(python: Path, tmp_path: Path):
    """Starts ``eyas launch``; however that ends, nothing of the engine is left a minute later."""
    started: list[Launched] = []
    names = iter(range(100))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored

    def start(target: Path, drafter: Path, *arguments: str) -> Launched:
        log = tmp_path / f"server-{next(names)}.log"
        one = Launched(python, target, drafter, log, *arguments, cache=tmp_path / "cache")
        started.append(one)
        return one

    yield start
    signal.signal(signal.SIGINT, before)
    for one in started:
        one.close()
        deadline = time.monotonic() + 60
        while one.left() and time.monotonic() < deadline:
            time.sleep(0.5)
        assert not one.left(), [(process.pid, process.name()) for process in one.left()]


@contextlib.contextmanager
def plain(python: Path, target: Path, *arguments: str) -> Iterator[str]:
    """vLLM without speculation, at the address that it yields."""
    address = Address("127.0.0.1", free_port())
    command = [str(python), "-m", *vllm.program(target, named=False), "--port", str(address.port)]
    with Server([*command, *arguments], {**os.environ}, vllm.signs({}, {}), address) as server:
        for event in server.events():
            assert not isinstance(event, Ended), event
            if isinstance(event, Ready):
                break
        draining = threading.Thread(target=lambda: list(server.events()), daemon=True)
        draining.start()
        yield address.url
        os.killpg(server.pid, signal.SIGTERM)
        draining.join(60)


def answers(url: str, prompts: Sequence[Sequence[int]], tokens: int, **more: Any) -> list[dict[str, Any]]:
    """Greedy answers to token ids, 16 at a time, each with its token ids."""

    def ask(prompt: Sequence[int]) -> dict[str, Any]:
        body = {"prompt": list(prompt), "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
        reply = httpx.post(f"{url}/v1/completions", json={**body, "return_token_ids": True, **more}, timeout=900)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(ask, prompts))


def differences(plain: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> list[tuple[int, int, float]]:
    """Where two lists of answers part: prompt, position, and how far plain decoding's two best tokens are apart.

    ``plain`` comes with the two best log-probabilities of each token (``logprobs=2``).
    """
    found = []
    for number, (one, two) in enumerate(zip(plain, other, strict=True)):
        pairs = zip(one["token_ids"], two["token_ids"], strict=True)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is not None:
            best = sorted(one["logprobs"]["top_logprobs"][at].values(), reverse=True)
            found.append((number, at, best[0] - best[1] if len(best) > 1 else 0.0))
    return found


# Ends before it is ready

HIDDEN = 128  # with four heads: vLLM's attention on CPUs wants heads of 32 or more, and says so at the first request
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 8, "vocab_size": 96}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
LLAMA = (*EAGER, "--max-model-len", "64", "--max-num-seqs", "4", "--spec-tokens", "2")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_llama(**SIZES, **HEADS, head_dim=8).save_pretrained(folder)  # which no request survives
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "eagle3"
    storage.save(small(), folder, "vllm")
    return folder


def small() -> Eagle3Model:
    return untrained(HIDDEN, 8, 96, seed=7, head_dim=32, max_position_embeddings=256)


def copied(source: Path, place: Path) -> Path:
    place.mkdir()
    for file in source.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


def test_a_port_that_is_held(launch, llama, small_drafter):
    with socket.create_server(("127.0.0.1", 0)) as held:
        server = launch(llama, small_drafter, "--port", str(held.getsockname()[1]), *LLAMA)
        assert server.wait(START) == 1
    assert f"is held by process {os.getpid()} (" in server.err.decode() and not server.log.exists()


def test_a_flag_that_vllm_does_not_know(launch, llama, small_drafter):
    server = launch(llama, small_drafter, "--port", str(free_port()), *LLAMA, "--no-such-flag", "3")
    end = server.event("end")
    assert server.wait() == 1 and end["diagnosis"]["what"].startswith("the engine knows no --no-such-flag")


def test_a_crash_while_it_loads(launch, llama, small_drafter, tmp_path):
    broken = copied(llama, tmp_path / "broken")
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    server = launch(broken, small_drafter, "--port", str(free_port()), *LLAMA)
    end = server.event("end")
    assert server.wait() == 1 and end["failed"] and not end["was_ready"]
    cause = end["traceback"].splitlines()[-1]  # the worker's, not one of those that only pass it on
    assert cause.startswith("safetensors._safetensors_rust.SafetensorError: Error while deserializing header")
    assert end["diagnosis"]["what"].startswith("a file of weights is not whole: Error while deserializing header")


def test_interrupted_while_it_loads(launch, llama, small_drafter):
    server = launch(llama, small_drafter, "--port", str(free_port()), *LLAMA)
    deadline = time.monotonic() + START
    while "EngineCore" not in server.tail() and time.monotonic() < deadline:
        time.sleep(0.2)
    server.process.send_signal(signal.SIGINT)
    assert server.wait(START) == 130
    end = server.event("end")
    assert not end["failed"] and not end["was_ready"] and end["asked"] == signal.SIGINT


def test_a_crash_while_it_serves(launch, llama, small_drafter):
    """At the first request, in a worker: two other processes raise behind it, and the worker's traceback is shown."""
    server = launch(llama, small_drafter, "--port", str(free_port()), *LLAMA, "--served-model-name", "m")
    ready = server.event("ready")
    asked = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 8}
    assert httpx.post(f"{ready['url']}/v1/completions", json=asked, timeout=300).status_code == 500
    end = server.event("end")
    assert server.wait() != 0 and end["failed"] and end["was_ready"] and end["asked"] is None
    cause = "RuntimeError: Unsupported CPU attention configuration: head_dim=8"
    assert end["traceback"].splitlines()[-1].startswith(cause) and cause in end["diagnosis"]["what"]


def test_a_drafter_in_another_dialect(launch, llama, tmp_path):
    """Names with SGLang's "model." in front: the check says it and a conversion cures it; vLLM by itself dies of it."""
    foreign = tmp_path / "foreign"
    storage.save(small(), foreign, "sglang")
    tensors = {f"model.{name}": tensor for name, tensor in load_file(foreign / "model.safetensors").items()}
    save_file(tensors, foreign / "model.safetensors")
    port = ("--port", str(free_port()))

    checked = launch(llama, foreign, *port, *LLAMA, "--dry-run")
    conversion = checked.event("plan")["conversion"]
    assert checked.wait() == 0 and conversion["dialects"] == ["sglang", "vllm"]
    foretold = re.compile(r"There is no module or parameter named 'model[^']*' in LlamaModel")
    assert [problem for problem in conversion["why"] if foretold.search(problem["evidence"])], conversion["why"]
    assert [problem for problem in conversion["why"] if "captures entry ids [1, 3, 4]" in problem["evidence"]]

    unchecked = launch(llama, foreign, *port, *LLAMA, "--no-check")
    end = unchecked.event("end")
    assert unchecked.wait() == 1 and end["failed"] and not end["was_ready"]
    assert foretold.search(end["traceback"])
    assert end["diagnosis"]["what"].startswith("vLLM has no place for weights named model: "), end


# (b) a wrapper that vLLM has no EAGLE-3 for

WRAPPER = "Qwen2AudioForConditionalGeneration"
TEXT_ONLY = (*EAGER, "--max-model-len", "128", "--limit-mm-per-prompt", '{"audio": 0}', "--max-num-seqs", "8")


@pytest.fixture(scope="session")
def wrapper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights under the names that vLLM's loader takes for this class, with a processor of the right sizes."""
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("wrapper")
    text = Qwen2Config(**SIZES, **HEADS, tie_word_embeddings=False, initializer_range=0.4)
    audio = Qwen2AudioEncoderConfig(
        d_model=32, encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=48, num_mel_bins=16,
        max_source_positions=32,
    )  # fmt: skip
    config = Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_index=91)
    said = config.to_dict() | {"architectures": [WRAPPER], "dtype": "float32", "torch_dtype": "float32"}
    said["text_config"]["architectures"] = ["Qwen2ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(said))
    language, tower = Qwen2ForCausalLM(text), Qwen2AudioEncoder(audio)
    weights = {f"language_model.{name}": tensor for name, tensor in language.state_dict().items()}
    weights |= {f"audio_tower.{name}": tensor for name, tensor in tower.state_dict().items()}
    weights |= {
        "multi_modal_projector.linear.weight": torch.randn(HIDDEN, 32),
        "multi_modal_projector.linear.bias": torch.zeros(HIDDEN),
    }
    save_file({name: tensor.float().contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]})
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    Qwen2AudioProcessor(extractor, tokenizer, chat_template="{{ messages }}").save_pretrained(folder)
    return folder


def test_a_wrapper_without_and_with_the_plugin(launch, python, wrapper, small_drafter):
    """vLLM's own errors without it, one behind the other; with it the output of plain decoding. Then kill -9."""
    flags = ("--port", str(free_port()), *TEXT_ONLY, "--spec-tokens", "2")
    for overrides, error, said in (
        ((), "has no attribute 'image_token_index'", "vLLM looks for image_token_index in the target's config"),
        (
            ("--hf-overrides", '{"image_token_index": 91}'),
            "Model does not support EAGLE3 interface",
            "the target's class does not have vLLM's SupportsEagle3",
        ),
    ):
        without = launch(wrapper, small_drafter, "--no-plugin", "--no-check", *flags, *overrides)
        end = without.event("end")
        assert without.wait() == 1 and end["failed"] and not end["was_ready"]
        assert error in end["traceback"] and end["diagnosis"]["what"].startswith(said)

    refused = launch(wrapper, small_drafter, "--no-plugin", *flags)
    assert refused.wait(START) == 1
    foretold = json.dumps(refused.event("unfit")["check"])
    assert "SupportsEagle3" in foretold and "image_token_index" in foretold

    served = launch(wrapper, small_drafter, *flags)
    ready = served.event("ready")
    assert ready["plugin"]["proved"] and WRAPPER in ready["plugin"]["text"]
    assert "passed on to language_model: Qwen2ForCausalLM" in ready["plugin"]["text"]
    model = httpx.get(f"{ready['url']}/v1/models", timeout=60).json()["data"][0]["id"]
    prompts = [[3 + (7 * n + i * i) % 85 for i in range(12 + n)] for n in range(12)]
    fast = answers(ready["url"], prompts, 64, model=model)
    drafts = from_prometheus(httpx.get(f"{ready['url']}/metrics", timeout=60).text).steps
    assert drafts is not None and drafts > 100  # it did speculate
    served.process.kill()
    assert served.wait() == -signal.SIGKILL and len(served.family) >= 3
    _, alive = psutil.wait_procs(list(served.family), timeout=60)  # the guard's work: nobody else is left to do it
    assert not [process for process in alive if not _is_zombie(process)]

    with plain(python, wrapper, *TEXT_ONLY) as url:
        slow = answers(url, prompts, 64, model=model, logprobs=2)
    assert len({token for one in slow for token in one["token_ids"]}) >= 20  # or nothing was compared
    assert differences(slow, fast) == []


# (a) SmolLM2 with a drafter in SGLang's dialect


@pytest.fixture(scope="session")
def smollm2() -> Path:
    from eyas.target.smollm2 import smollm2_folder

    return smollm2_folder()


@pytest.fixture(scope="session")
def sglang_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained drafter of SmolLM2, as SGLang spells it."""
    named = os.environ.get("EYAS_TEST_DRAFTER")
    found = Path(named) if named else shipped_drafter("smollm2")
    if found is None:
        pytest.skip("NOT TESTED: no drafter of SmolLM2 comes with this Eyas; EYAS_TEST_DRAFTER names one")
    if dialects.read(Checkpoint.open(found)).dialect == "sglang":
        return found
    out = tmp_path_factory.mktemp("drafter") / "sglang"
    convert(found, "sglang", out)
    return out


def heldout_prompts(smollm2: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    from eyas.training.heldout import CHAT, CODE, MATHS

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    asked = [[{"role": "user", "content": text}] for text in (*CHAT, *CODE, *MATHS)]
    texts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, tokenize=False) for one in asked]
    return [tokenizer(text)["input_ids"] for text in texts]


SMOLLM2 = (*EAGER, "--max-model-len", "1024", "--served-model-name", "m", "--max-num-seqs", "16")


def embedded(target: Path, drafter: Path, prompts: Sequence[Sequence[int]]) -> tuple[Speculation, list[list[int]]]:
    from eyas.core import DraftShape
    from eyas.engine.llm import load
    from eyas.engine.stats import AcceptanceStats

    torch.set_num_threads(os.cpu_count() or 1)
    shape = DraftShape(DRAFT, 1, DRAFT + 1)
    serving = {"speculation": "fixed", "max_running_requests": 16}
    llm = load(target, drafter, dtype="float32", shape=shape, context_length=1024, **serving)
    requests = [llm.request(list(prompt), max_tokens=TOKENS, ignore_eos=True) for prompt in prompts]
    stats, tokens = AcceptanceStats(), {request.id: list[int]() for request in requests}
    for output in llm.stream_all(requests):
        assert output.error is None
        tokens[output.request_id] += [token.token_id for token in output.emitted]
        if output.finish_reason is not None and output.stats is not None:
            stats.add(output.stats)
    return from_stats(stats), list(tokens.values())


@pytest.mark.real
def test_smollm2_with_a_drafter_of_sglang(launch, python, smollm2, sglang_drafter):
    """The same text as without, and the embedded engine's acceptance by position, over 5,000 drafts."""
    prompts = heldout_prompts(smollm2)
    server = launch(smollm2, sglang_drafter, "--port", str(free_port()), *SMOLLM2, "--spec-tokens", str(DRAFT))
    plan, ready = server.event("plan"), server.event("ready")
    assert plan["conversion"]["dialects"] == ["sglang", "vllm"] and ready["seconds"] > 0
    assert ready["plugin"] == {"proved": True, "text": "the plugin found nothing missing in LlamaForCausalLM"}
    before = httpx.get(f"{ready['url']}/metrics", timeout=60).text
    fast = answers(ready["url"], prompts, TOKENS)
    drafted = from_prometheus(httpx.get(f"{ready['url']}/metrics", timeout=60).text, before, "m")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(START) == 0 and server.event("end")["failed"] is False

    with plain(python, smollm2, *SMOLLM2) as url:
        slow = answers(url, prompts[::3], TOKENS, logprobs=2)  # a third of each task: more shows nothing else
    parted = differences(slow, fast[::3])
    print("text that parts (prompt, token, gap):", parted)
    assert not [each for each in parted if each[2] > 1e-3], parted  # nearer than float32 adds up in another order
    assert len(parted) <= 1, parted

    ours, texts = embedded(smollm2, sglang_drafter, prompts)
    assert sum(a != b["token_ids"] for a, b in zip(texts, fast, strict=True)) <= len(prompts) // 50
    assert drafted.steps is not None and drafted.steps >= 5000 and ours.steps is not None and ours.steps >= 5000
    theirs, mine = drafted.acceptance_rates, ours.acceptance_rates
    print("acceptance by position: vLLM", theirs, "embedded", mine, "drafts", drafted.steps, ours.steps)
    assert theirs is not None and mine is not None and len(theirs) == len(mine) == DRAFT
    for their, our in zip(theirs, mine, strict=True):
        assert their is not None and our is not None and abs(their - our) < TWO_POINTS, (theirs, mine)
    assert ours.acceptance_length is not None and ours.acceptance_length > 1.5  # or nothing was compared


@pytest.mark.real
def test_a_drafter_without_its_vocabulary(launch, smollm2, sglang_drafter, tmp_path):
    """Without d2t vLLM takes the drafter's ids for the target's, and says nothing. Then the engine core is killed."""
    convert(sglang_drafter, "vllm", tmp_path / "vllm", target=Verifier.read(smollm2))
    lost = copied(tmp_path / "vllm", tmp_path / "lost")
    tensors = {name: value for name, value in load_file(lost / "model.safetensors").items() if name not in MAPS}
    save_file(tensors, lost / "model.safetensors")
    flags = ("--port", str(free_port()), *SMOLLM2, "--spec-tokens", str(DRAFT))
    refused = launch(smollm2, lost, *flags)
    assert refused.wait(START) == 1
    problems = refused.event("unfit")["check"]["problems"]
    assert [p for p in problems if p["severity"] == "silent" and "d2t" in p["evidence"]], problems

    served = launch(smollm2, lost, *flags, "--no-check")
    ready = served.event("ready")  # it does start
    answers(ready["url"], heldout_prompts(smollm2)[::4], 32)
    drafted = from_prometheus(httpx.get(f"{ready['url']}/metrics", timeout=60).text)
    print("without d2t:", drafted)
    assert drafted.steps is not None and drafted.steps > 500
    assert drafted.acceptance_length is not None and drafted.acceptance_length < 1.1  # 1.9 with it
    core = next(p for p in psutil.Process(ready["pid"]).children(recursive=True) if "EngineCore" in p.name())
    core.kill()
    end = served.event("end", 120)
    assert served.wait() != 0 and end["failed"] and end["was_ready"] and end["asked"] is None
    assert "died without a word" in end["diagnosis"]["what"] or "was killed" in end["diagnosis"]["what"]
