"""Tracebacks out of logs that several processes write, and what they mean."""

from __future__ import annotations

import re

import pytest
from bridges import actor

from eyas.bridges import failures
from eyas.bridges.failures import COMMON, Tracebacks, diagnose, exception_of, failing_lines
from eyas.bridges.sglang import launch as sglang
from eyas.bridges.vllm import launch as vllm


def picked(text: str, engine=vllm) -> str:
    found = Tracebacks(engine._HEADER)
    for line in text.splitlines():
        message = line[engine._HEADER.match(line).end() :] if engine._HEADER.match(line) else line
        if engine._FATAL.match(message):
            found.mark()
        found.feed(line)
    return found.root()


def raised(error: str, prefix: str = "") -> str:
    lines = ["Traceback (most recent call last):", '  File "x.py", line 1, in f', "    g()", error]
    return "\n".join(prefix + line for line in lines) + "\n"


def test_none():
    assert picked("INFO all is well\n") == "" == exception_of("")


def test_processes_that_write_at_once():
    one, two = (raised(f"ValueError: {n}", f"(Worker_TP{n} pid={n}) ").splitlines() for n in (1, 2))
    mixed = "\n".join(line for pair in zip(one, two, strict=True) for line in pair)
    assert picked(mixed + "\n") == raised("ValueError: 2").rstrip()
    failed = "(Worker_TP1 pid=1) ERROR 11-30 08:13:05 [multiproc_executor.py:953] WorkerProc failed to start.\n"
    assert picked(failed + mixed) == raised("ValueError: 1").rstrip()


def test_an_earlier_one_is_not_the_cause():
    harmless = raised("ImportError: no flash_attn") + "INFO going on\n"
    assert exception_of(picked(harmless + actor.VLLM_DIES)).startswith("RuntimeError: Model does not support EAGLE3")
    assert exception_of(picked(harmless + actor.SGLANG_DIES, sglang)).startswith("Exception: Capture cuda graph failed")
    assert exception_of(picked(harmless + raised("ValueError: bad flag"))) == "ValueError: bad flag"


@pytest.mark.parametrize(
    "says",
    [
        "Worker failed with error '...', please check the stack trace above for the root cause",
        "WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.",
        "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}",
    ],
)
def test_one_that_points_back(says):
    worker = raised("KeyError: 'layers.9'", "(Worker pid=3) ") + "(Worker pid=3) INFO 11-30 08:13:05 [x.py:1] so\n"
    core = "(EngineCore pid=2) ERROR 11-30 08:13:05 [core.py:1] EngineCore failed to start.\n" + raised(
        f"RuntimeError: {says}",
        "(EngineCore pid=2) ERROR 11-30 08:13:05 [core.py:1] ",
    )
    assert exception_of(picked(worker + core)) == "KeyError: 'layers.9'"


def test_a_message_of_several_lines():
    text = raised("pydantic_core.ValidationError: 1 validation error for SpeculativeConfig") + (
        "  Value error, num_speculative_tokens must be positive [type=value_error, input_value=1]\n"
        "    For further information visit https://errors.pydantic.dev\nINFO behind it\n"
    )
    found = picked(text)
    assert found.splitlines()[-1].startswith("    For further") and "behind it" not in found
    said = diagnose(vllm.KNOWN, [found])
    assert said is not None and said.what == (
        "--speculative-config is refused: Value error, num_speculative_tokens must be positive [type=value_error, "
        "input_value=1]"
    )
    of_a_field = "2 validation errors for SpeculativeConfig\nmethod\n  Input should be 'x'\n    For further information"
    said = diagnose(vllm.KNOWN, [of_a_field])
    assert said is not None and said.what == "--speculative-config is refused: method Input should be 'x'"


def test_an_endless_one_is_cut():
    text = "Traceback (most recent call last):\n" + "  File x\n" * 3000 + "RecursionError: too deep\n"
    found = picked(text).splitlines()
    assert len(found) == 401 and found[-1] == "RecursionError: too deep" and "more lines" in found[200]


def test_what_is_kept_of_a_long_life():
    """A server that logs a traceback for each bad request, for months."""
    found = Tracebacks(vllm._HEADER)
    for number in range(3 * failures._MOST):
        for line in raised(f"ValueError: {number}").splitlines():
            found.feed(line)
    assert len(found._blocks) == failures._MOST and found.root().endswith(f"ValueError: {number}")
    found.mark()
    for number in range(1000, 1000 + 3 * failures._MOST):
        for line in raised(f"ValueError: {number}").splitlines():
            found.feed(line)
    assert len(found._blocks) == 2 * failures._MOST and found.root().endswith("ValueError: 1000")
    for _ in range(10000):
        found.feed("  File x")  # one that does not end
    assert sum(len(block._head) + len(block._rest) for block in found._blocks) < 2 * failures._MOST * 10
    found.forget()
    assert found.root() == "" and not found._blocks


def test_a_traceback_in_a_prompt():
    asked = "(APIServer pid=1) INFO 11-30 08:13:05 [logger.py:1] Received request: prompt: 'why Traceback (most recent "
    asked += "call last):\\n  File x\\nValueError: bad', params: SamplingParams(n=1)"
    assert picked(raised("KeyError: 'mine'") + asked + "\n") == raised("KeyError: 'mine'").rstrip()


def test_lines_by_which_it_fails():
    asked = "(APIServer pid=1) INFO 11-30 08:13:05 [logger.py:1] Received request: 'EngineCore failed to start.'"
    own = [
        "(EngineCore pid=2) ERROR 11-30 08:13:05 [core.py:1] something went wrong",
        "(APIServer pid=1) [shutdown] MPClient: engine core exited unexpectedly",
        "RuntimeError: no more",
        "api_server.py: error: unrecognized arguments: --x",
    ]
    lines = [asked, *own, 'INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK', "an Error: in a sentence"]
    assert failing_lines(lines, vllm._HEADER, vllm._FATAL) == own


# What each engine really says, from its source, and what has to be made of it.
SGLANG = [
    (actor.SGLANG_DIES, "KimiK25ForConditionalGeneration does not pass set_eagle3_layers_to_capture on", "eyas patch"),
    ("AttributeError: 'KimiVL' object has no attribute 'get_embed_and_head'", "KimiVL does not pass get", "plugin"),
    (
        "ValueError: Model KimiVL does not implement set_eagle3_layers_to_capture, which EAGLE3 aux hidden-state",
        "KimiVL does not pass set_eagle3_layers_to_capture on",
        "plugin",
    ),
    (
        "AttributeError: 'LlamaForCausalLM' object has no attribute 'hot_token_id'",
        "the drafter was loaded as LlamaForCausalLM, which is no EAGLE-3 drafter (it has no hot_token_id)",
        "--to sglang",
    ),
    ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "no room", "--mem-fraction"),
    ("ValueError: too many values to unpack (expected 2)", "not marked on the decoder layers", "38307"),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "GPU's memory does not", "more GPUs"),
    (
        "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a",
        "a scheduler was killed (SIGKILL)",
        "dmesg",
    ),
    ("launch_server.py: error: unrecognized arguments: --tpp 2", "the engine knows no --tpp 2", "--help"),
    (
        "launch_server.py: error: argument --page-size: invalid int value: 'x'",
        "refuses --page-size: invalid int value: 'x'",
        "correct",
    ),
    ("[Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use", "port", "--port"),
    ("ModuleNotFoundError: No module named 'sgl_kernel'", "whole: ModuleNotFoundError: No module", "--engine-python"),
    (
        "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file no",
        "a file of weights is not whole: Error while deserializing header: incomplete metadata",
        "fetch them again",
    ),
    (
        "CannotServeEagle3: eyas-plugin: X cannot be a target of EAGLE-3 in this SGLang: nothing inside it has y.",
        "eyas-plugin: X cannot be a target of EAGLE-3 in this SGLang: nothing inside it has y.",
        "eyas check",
    ),
]  # fmt: skip
VLLM = [
    (actor.VLLM_DIES, "does not have vLLM's SupportsEagle3", "plugin"),
    ("AttributeError: 'KimiVLConfig' object has no attribute 'image_token_index'", "image_token", "--hf-overrides"),
    (
        "ValueError: There is no module or parameter named 'midlayer.fc' in Eagle3LlamaForCausalLM.",
        "no place for weights named midlayer.fc",
        "--to vllm",
    ),
    ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", "no room", "CPU"),
    (
        "ValueError: To serve at least one request with the model's max seq len (8192), (2.5 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (1.5 GiB). Based on the available memory,",
        "one request of 8192 tokens takes 2.5 GiB, and there are 1.5",
        "--max-model-len",
    ),
    (
        "ValueError: Free memory on device cuda:0 (3.1/139.8 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 125.8 GiB).",
        "less GPU memory is free than --gpu-memory-utilization claims: cuda:0 (3.1/139.8 GiB)",
        "nvidia-smi",
    ),
    ("RuntimeError: Engine core initialization failed. Failed core proc(s): {'EngineCore': -9}", "was killed", "dmesg"),
    ("[shutdown] MPClient: engine core exited unexpectedly; starting", "engine core died without a word", "dmesg"),
    ("Engine core proc EngineCore_0 died unexpectedly, shutting", "proc EngineCore_0 died without a word", "dmesg"),
    ("OSError: [Errno 28] No space left on device: '/psm_1'", "/dev/shm is full", "--shm-size"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "text", "what", "fix"), [(sglang, *row) for row in SGLANG] + [(vllm, *row) for row in VLLM]
)
def test_diagnoses(engine, text, what, fix):
    found = diagnose((*engine.KNOWN, *COMMON), [text])
    assert found is not None and what in found.what and fix in found.fix


def test_the_traceback_counts_before_the_rest():
    found = diagnose((*vllm.KNOWN, *COMMON), [raised("OutOfMemoryError: 2 GiB"), actor.VLLM_DIES])
    assert found is not None and "GPU's memory" in found.what
    assert diagnose(COMMON, ["", "all is well"]) is None


def test_every_pattern_names_its_groups():
    for known in (*sglang.KNOWN, *vllm.KNOWN, *COMMON):
        named = set(re.findall(r"\\g<(\w+)>", known.what + known.fix))
        assert named <= set(re.compile(known.pattern).groupindex)
