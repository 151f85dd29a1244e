"""How vLLM is started with EAGLE-3, and what its log says: entrypoints/cli, v1/engine/core.py, v1/executor."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.bridges.code.source import EngineSource
from eyas.bridges.failures import Known
from eyas.bridges.flags import Given, refuse_another
from eyas.bridges.following import Signs
from eyas.bridges.profiling import Profiling
from eyas.core import UsageError

DIALECT = "vllm"
PORT = 8000  # by default
UNFOLLOWED = ("headless", "grpc", "uds", "data_parallel_multi_port_external_lb")  # these have no health endpoint
DRAFT_TOKENS = 3  # vLLM has no default
_HEADER = re.compile(
    r"^(\((?P<process>[^()]+ pid=\d+)\) ?)?"
    r"((?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d(\.\d+)? \[[^\]]*\] ?)?"
)
_STAGES = (
    (r"Loading \w+ checkpoint shards|Starting to load model", "loading weights"),
    (r"Loading drafter model", "loading the drafter"),
    (r"Capturing CUDA graphs", "capturing CUDA graphs"),
    (r"Warming up model|Dynamo bytecode transform|Compiling a graph", "compiling"),
    (r"init engine \(profile", "starting the API server"),
    (r"Initializing a V1 LLM engine", "starting the engine core"),
    (r"Resolved architecture", "reading configs"),
)
_READY = re.compile(r"(INFO: +)?Application startup complete\.")
_FATAL = re.compile(
    r"EngineCore failed to start\.|EngineCore encountered a fatal error\.|(Ray)?WorkerProc failed"
    r"|Worker proc .* died unexpectedly|Engine core proc .* died unexpectedly"
    r"|\[shutdown\] MPClient: engine core exited unexpectedly"
)
_SILENT = ("warning", "error", "critical")
_CONFIG = re.compile(r"(--speculative[-_]config|-sc)((?:\.[\w-]+)*)(?:=(.*))?", re.DOTALL)
_SHORT = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": "num_speculative_tokens"}
_IN_FILE = re.compile(r"spec_(method|model|tokens)|speculative_config\..+")

# What is read here as well. vLLM knows these by a beginning too, as long as no other flag begins like that.
READ = (
    "--model", "--config", *_SHORT, "--speculative-config", "-sc", "--host", "--port", "--uds", "--ssl-keyfile",
    "--headless", "--grpc", "--api-key", "--uvicorn-log-level", "--log-config-file", "--device",
    "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp",
    "--data-parallel-size-local", "-dpl", "--data-parallel-multi-port-external-lb",
)  # fmt: skip

KNOWN = (
    Known(
        r"Model does not support EAGLE3 interface",
        "the target's class does not have vLLM's SupportsEagle3; wrappers often do not pass it on",
        "let eyas launch's plugin add it (do not use --no-plugin), or write it into the source with eyas patch",
    ),
    Known(
        r"has no attribute 'image_token_index'",
        "vLLM looks for image_token_index in the target's config, which calls the image token otherwise",
        "let eyas launch's plugin give it (do not use --no-plugin), or --hf-overrides '{\"image_token_index\": ID}' "
        "with the id of that token; without the plugin SupportsEagle3 is mostly missing as well",
    ),
    Known(
        r"There is no module or parameter named '?(?P<name>[\w.]+)'?",
        r"vLLM has no place for weights named \g<name>: the checkpoint is in another dialect, or for another class",
        "eyas convert D OUT --to vllm --target TARGET; eyas check D says what it is",
    ),
    Known(
        r"Following weights were not initialized from checkpoint: (?P<names>.+)",
        r"weights are missing in the checkpoint: \g<names>",
        "eyas check D lists what it has and lacks",
    ),
    Known(
        r"No available memory for the cache blocks",
        "weights and drafter leave no room for the KV cache",
        "raise --gpu-memory-utilization, lower --max-model-len, or spread the target over more GPUs; on a CPU set "
        "VLLM_CPU_KVCACHE_SPACE (GiB)",
    ),
    Known(
        r"max seq len \((?P<length>\d+)\).*?(?P<need>[\d.]+) GiB KV cache is needed.*?memory \((?P<has>[\d.]+) GiB\)",
        r"the KV cache of one request of \g<length> tokens takes \g<need> GiB, and there are \g<has>",
        "lower --max-model-len, or raise --gpu-memory-utilization (on a CPU VLLM_CPU_KVCACHE_SPACE)",
    ),
    Known(
        r"Free memory on device (?P<free>[^)]*\)) .*?is less than",
        r"less GPU memory is free than --gpu-memory-utilization claims: \g<free>",
        "end what else runs on this GPU (nvidia-smi), or lower --gpu-memory-utilization",
    ),
    Known(
        r"validation errors? for SpeculativeConfig\s+(?P<why>[^\n]*(\n  (?!  )[^\n]*)?)",
        r"--speculative-config is refused: \g<why>",
        "correct it; eyas check TARGET --drafter D --engine vllm -- --speculative-config '{...}' tells beforehand",
    ),
    Known(
        r"exit ?code: ?-9\b|proc\(s\): \{[^}]*: -9",
        "a process of the engine was killed (SIGKILL): mostly the kernel does that, when the machine's memory is full",
        "dmesg -T | grep -i oom shows it; give it more memory, or a smaller KV cache",
    ),
    Known(
        r"(?P<name>(Engine core|Worker) proc \S+|engine core) (died|exited) unexpectedly",
        r"\g<name> died without a word: killed from outside, by the kernel for want of memory, or in compiled code",
        "dmesg -T shows the kernel's reason; give it more memory, or a smaller KV cache",
    ),
)


def program(target: Path, named: bool) -> list[str]:
    """The module to run, with the target. ``named``: vLLM is installed as the distribution "vllm".

    Its command line asks for that distribution's version and dies without (vllm-cpu); the server itself does not.
    """
    if named:
        return ["vllm.entrypoints.cli.main", "serve", str(target)]
    return ["vllm.entrypoints.openai.api_server", "--model", str(target)]


def arguments(target: Path, drafter: Path, given: Given) -> tuple[list[str], list[str]]:
    """One whole --speculative-config, from the file as well as from arguments, and the arguments that are left."""
    asked, rest = _asked(given)
    config = {"method": "eagle3", "num_speculative_tokens": DRAFT_TOKENS} | asked
    if config["method"] != "eagle3":
        raise UsageError(f'--speculative-config: method is {config["method"]!r}; eyas launch is for "eagle3"')
    if "model" in config:
        raise UsageError("--speculative-config: model is what --drafter says to eyas launch; give it once")
    if any(re.match(r"--model(=|$)", part) for part in rest):
        raise UsageError("--model is what TARGET says to eyas launch; give it once")
    refuse_another("model", given, target)
    return ["--speculative-config", json.dumps(config | {"model": str(drafter)})], rest


def _asked(given: Given) -> tuple[dict[str, Any], list[str]]:
    """The speculative config of the file, with what arguments say instead, and the other arguments."""
    if name := next((name for name in given.file if _IN_FILE.fullmatch(name)), ""):
        raise UsageError(
            f"--config: {name} in the file would stand against the config that Eyas gives vLLM; write it as a key of "
            "speculative-config there, or give it as an argument"
        )
    config, rest = _taken(given.arguments)
    written = given.file.get("speculative_config", {})
    if not isinstance(written, dict):
        raise UsageError(f"--config: speculative-config in the file is {written!r}, not keys and their values")
    if wrong := [name for name in written if not isinstance(name, str)]:
        raise UsageError(f"--config: speculative-config in the file has the key {wrong[0]!r}, which is not a name")
    return {_key(name): value for name, value in written.items()} | config, rest


def _taken(given: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The speculative config from all of its spellings, and the other arguments."""
    config, rest = dict[str, Any](), list[str]()
    parts = iter(given)
    for part in parts:
        name, equals, value = part.partition("=")
        short = _SHORT.get(name.replace("_", "-"))
        found = _CONFIG.fullmatch(part)
        if short is None and found is None:
            rest.append(part)
            continue
        text = value if equals else next(parts, None)
        if text is None:
            raise UsageError(f"{name} needs a value")
        path = [short] if short else [key for key in (found[2] if found else "").split(".") if key]
        _set(config, path, text, name)
    return config, rest


def _set(config: dict[str, Any], path: Sequence[str], text: str, flag: str) -> None:
    try:
        value = json.loads(text)
    except ValueError as error:
        if not path:
            raise UsageError(f"{flag}: not valid JSON: {error}") from error
        value = text  # --speculative-config.method eagle3
    if not path and not isinstance(value, dict):
        raise UsageError(f"{flag} is {text!r}, not a JSON object; quote it for the shell")
    for key in reversed(path):
        value = {key: value}
    config.update({_key(key): value for key, value in value.items()})


def _key(name: str) -> str:
    return name.replace("-", "_")


def notes(flags: Mapping[str, Any], given: Given, environment: Mapping[str, str]) -> Iterator[str]:
    if host(flags) in ("", "0.0.0.0", "::") and "api_key" not in flags and "VLLM_API_KEY" not in environment:
        yield "it listens on all interfaces without --api-key: whoever can reach this port can use the model"
    if "num_speculative_tokens" not in _asked(given)[0]:
        yield (
            f"num_speculative_tokens is {DRAFT_TOKENS}, which Eyas chose since vLLM has no default; --spec-tokens or "
            "--speculative-config says otherwise"
        )
    if _ready(flags, environment) is None:
        yield "its log was told not to say when it is ready: the health endpoint alone decides"


def host(flags: Mapping[str, Any]) -> str:
    return str(flags.get("host") or "")


def signs(flags: Mapping[str, Any], environment: Mapping[str, str]) -> Signs:
    return Signs(_HEADER, _STAGES, _ready(flags, environment), _FATAL)


def _ready(flags: Mapping[str, Any], environment: Mapping[str, str]) -> re.Pattern[str] | None:
    """None where nothing is said: by a log level, one's own logging, or the front end in Rust."""
    own = flags.get("log_config_file") or environment.get("VLLM_LOGGING_CONFIG_PATH")
    rust = environment.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0")
    return None if str(flags.get("uvicorn_log_level", "info")) in _SILENT or own or rust else _READY


def gpus(flags: Mapping[str, Any]) -> list[int]:
    """Which of the visible GPUs it takes on this node."""
    if str(flags.get("device", "auto")) not in ("auto", "cuda"):
        return []
    sizes = (
        ("tensor_parallel_size", "tp"),
        ("pipeline_parallel_size", "pp"),
        ("data_parallel_size_local", "dpl", "data_parallel_size", "dp"),
    )
    count = 1
    for names in sizes:
        found = next((flags[name] for name in names if name in flags), 1)
        count *= found if type(found) is int else 1
    return list(range(count))


def plugin_variables(source: EngineSource, environment: Mapping[str, str]) -> dict[str, str]:
    """Its entry points are called unless a list of plugins leaves it out."""
    allowed = environment.get("VLLM_PLUGINS")
    if allowed is None or "eyas" in allowed.split(","):
        return {}
    return {"VLLM_PLUGINS": ",".join([*filter(None, allowed.split(",")), "eyas"])}


def profiling(source: EngineSource, folder: Path, steps: int) -> Profiling:
    """PyTorch's profiler at hand, for ``steps`` steps: as --profiler-config, in older ones through the environment.

    A step is known by the marks of two passes, so one more pass is recorded. Raises UsageError for a vLLM that has
    neither.
    """
    fields = _fields(source, "vllm.config.profiler", "ProfilerConfig")
    wanted: dict[str, Any] = {
        "profiler": "torch",
        "torch_profiler_dir": str(folder),
        "torch_profiler_with_stack": False,
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,
        "max_iterations": steps + 1,
    }
    if {"profiler", "torch_profiler_dir"} <= fields:
        config = {name: value for name, value in wanted.items() if name in fields}
        return Profiling(("--profiler-config", json.dumps(config)), ends="max_iterations" in fields)
    module = source.module("vllm.envs")
    text = source.text(module) if module else ""
    variables = {
        "VLLM_TORCH_PROFILER_DIR": str(folder),
        "VLLM_TORCH_PROFILER_WITH_STACK": "0",
        "VLLM_TORCH_PROFILER_DISABLE_ASYNC_LLM": "1",
        "VLLM_PROFILER_MAX_ITERS": str(steps + 1),
    }
    known = {name: value for name, value in variables.items() if name in text}
    if "VLLM_TORCH_PROFILER_DIR" not in known:
        raise UsageError(f"{source.label} has neither ProfilerConfig nor VLLM_TORCH_PROFILER_DIR: leave out --profile.")
    return Profiling(variables=known, ends="VLLM_PROFILER_MAX_ITERS" in known)


def _fields(source: EngineSource, module: str, name: str) -> set[str]:
    """The fields of a dataclass, empty where it is not there."""
    path = source.module(module)
    body = source.tree(path).body if path else []
    found = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == name), None)
    lines = [line for line in (found.body if found else ()) if isinstance(line, ast.AnnAssign)]
    return {line.target.id for line in lines if isinstance(line.target, ast.Name)}
