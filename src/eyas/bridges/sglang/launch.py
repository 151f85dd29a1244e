"""How SGLang is started with EAGLE-3, and what its log says: entrypoints/http_server.py, engine.py, scheduler.py."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eyas.bridges.code.source import EngineSource
from eyas.bridges.failures import Known
from eyas.bridges.flags import Given, read_flags, refuse_another
from eyas.bridges.following import Signs
from eyas.bridges.profiling import Profiling
from eyas.core import UsageError

DIALECT = "sglang"
PORT = 30000  # by default
UNFOLLOWED = ("grpc_mode", "smg_grpc_mode", "encoder_only")  # these have no health endpoint
_HEADER = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?(?P<process>[^\]]*)\] ")
_STAGES = (
    (r"Capturing batches|Capture .*(graph|compile).* begin", "capturing graphs"),
    (r"Load weight begin|Loading \w+ checkpoint shards|Multi-thread loading shards", "loading weights"),
    (r"KV Cache is allocated|Memory pool end", "allocating the KV cache"),
    (r"Load weight end", "setting up attention"),
    (r"Started server process|Uvicorn running", "warming up"),
    (r"server_args=", "starting the schedulers"),
)
_READY = re.compile("The server is fired up and ready to roll!")
_FATAL = re.compile(
    r"\w+ hit an exception: |Received sigquit from a child process|Initialization failed\. "
    r"|Rank \d+ scheduler (is dead|died)"
)
_SILENT = ("warning", "error", "critical")
_EXTERNAL = "SGLANG_EXTERNAL_MODEL_PACKAGE"
_TARGET = ("model_path", "model")
_DRAFTER = ("speculative_draft_model_path", "speculative_draft_model")
# What is read here as well. SGLang knows these by a beginning too; --tp, --dp and --pp are such beginnings.
READ = (
    "--model-path", "--model", "--config", "--speculative-algorithm", "--speculative-draft-model-path",
    "--speculative-draft-model", "--host", "--port", "--ssl-keyfile", "--grpc-mode", "--smg-grpc-mode",
    "--encoder-only", "--api-key", "--log-level", "--nnodes", "--node-rank", "--device", "--base-gpu-id",
    "--gpu-id-step", "--enable-dp-attention", "--tensor-parallel-size", "--tp-size", "--tp",
    "--pipeline-parallel-size", "--pp-size", "--pp", "--data-parallel-size", "--dp-size", "--dp",
)  # fmt: skip

KNOWN = (
    Known(
        r"'(?P<cls>\w+)' object has no attribute '(?P<name>set_eagle3_layers_to_capture|get_embed_and_head)'",
        r"\g<cls> does not pass \g<name> on to the language model inside it",
        "let eyas launch's plugin add it (do not use --no-plugin), or write it into the source with eyas patch",
    ),
    Known(
        r"Model (?P<cls>\w+) does not implement set_eagle3_layers_to_capture",
        r"\g<cls> does not pass set_eagle3_layers_to_capture on to the language model inside it",
        "let eyas launch's plugin add it (do not use --no-plugin), or write it into the source with eyas patch",
    ),
    Known(
        r"'(?P<cls>\w+)' object has no attribute '(?P<name>hot_token_id|set_embed|load_lm_head_from_target)'",
        r"the drafter was loaded as \g<cls>, which is no EAGLE-3 drafter (it has no \g<name>)",
        'its config.json has to say "architectures": ["LlamaForCausalLMEagle3"]: eyas convert D OUT --to sglang',
    ),
    Known(
        r"has no attribute 'draft_vocab_size'",
        "the drafter's config.json has no draft_vocab_size, which SGLang reads without asking",
        "eyas convert D OUT --to sglang writes it",
    ),
    Known(
        r"too many values to unpack \(expected 2\)",
        "the layers to capture were set, but not marked on the decoder layers of this model",
        "known for Qwen3.5 and others (pull requests 25408 and 38307): take a newer SGLang",
    ),
    Known(
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        "weights and drafter leave no room for the KV cache",
        "raise --mem-fraction-static, or spread the target over more GPUs (--tp)",
    ),
    Known(
        r"EAGLE3 currently only supports 1 layer",
        "this SGLang builds drafters of one layer only",
        "take a newer SGLang, or a drafter of one layer",
    ),
    Known(
        r"context_length \((?P<asked>\d+)\) is greater than the derived context_length \((?P<has>\d+)\)",
        r"a context of \g<asked> tokens was asked for, the config allows \g<has>",
        "lower --context-length; for the drafter, eyas convert D OUT --to sglang --target TARGET raises its own limit",
    ),
    Known(
        r"exit ?code: ?-9\b",
        "a scheduler was killed (SIGKILL): mostly the kernel does that, when the machine's memory is full",
        "dmesg -T | grep -i oom shows it; give it more memory",
    ),
)


def program(target: Path, named: bool) -> list[str]:
    """The module to run, with the target, however SGLang is installed."""
    return ["sglang.launch_server", "--model-path", str(target)]


def arguments(target: Path, drafter: Path, given: Given) -> tuple[list[str], list[str]]:
    """What Eyas adds, and what was given. What SGLang chooses itself is left to it."""
    flags = read_flags(given.arguments)
    for name in (*_TARGET, *_DRAFTER):
        ours = "--drafter" if name in _DRAFTER else "TARGET"
        if name in flags or (name in _DRAFTER and name in given.file):
            raise UsageError(f"--{name.replace('_', '-')} is what {ours} says to eyas launch; give it once")
        refuse_another(name, given, target)
    algorithm = {**given.file, **flags}.get("speculative_algorithm", "EAGLE3")
    if str(algorithm).upper() != "EAGLE3":
        raise UsageError("eyas launch is for --speculative-algorithm EAGLE3; without it there is nothing to launch")
    asked = [] if "speculative_algorithm" in flags else ["--speculative-algorithm", "EAGLE3"]
    return [*asked, "--speculative-draft-model-path", str(drafter)], list(given.arguments)


def notes(flags: Mapping[str, Any], given: Given, environment: Mapping[str, str]) -> Iterator[str]:
    if host(flags) not in ("127.0.0.1", "localhost", "::1") and "api_key" not in flags:
        yield f"it listens on {host(flags)} without --api-key: whoever can reach this port can use the model"
    if _ready(flags, environment) is None:
        yield "its log was told not to say when it is ready: the health endpoint alone decides"


def host(flags: Mapping[str, Any]) -> str:
    return str(flags.get("host", "127.0.0.1"))


def signs(flags: Mapping[str, Any], environment: Mapping[str, str]) -> Signs:
    return Signs(_HEADER, _STAGES, _ready(flags, environment), _FATAL)


def _ready(flags: Mapping[str, Any], environment: Mapping[str, str]) -> re.Pattern[str] | None:
    """None where nothing is said: by a log level, one's own logging, or as a node that only computes."""
    silent = str(flags.get("log_level", "info")).lower() in _SILENT or "SGLANG_LOGGING_CONFIG_PATH" in environment
    return None if silent or _number(flags, "node_rank", default=0) > 0 else _READY


def gpus(flags: Mapping[str, Any]) -> list[int]:
    """Which of the visible GPUs it takes on this node."""
    if str(flags.get("device", "cuda")) not in ("cuda", "None"):
        return []
    tp, pp = (
        _number(flags, "tp_size", "tensor_parallel_size", "tp"),
        _number(flags, "pp_size", "pipeline_parallel_size", "pp"),
    )
    dp = 1 if flags.get("enable_dp_attention") else _number(flags, "dp_size", "data_parallel_size", "dp")
    count = max(1, tp * pp * dp // _number(flags, "nnodes"))
    first, step = _number(flags, "base_gpu_id", default=0), _number(flags, "gpu_id_step")
    return list(range(first, first + count * step, step))


def _number(flags: Mapping[str, Any], *names: str, default: int = 1) -> int:
    found = next((flags[name] for name in names if name in flags), default)
    return found if type(found) is int else default


def plugin_variables(source: EngineSource, environment: Mapping[str, str]) -> dict[str, str]:
    """Entry points where it knows them, else a package of models. Raises UsageError where that is taken."""
    if source.module("sglang.srt.plugins") is not None:
        allowed = environment.get("SGLANG_PLUGINS", "")
        wanted = allowed and "eyas" not in [name.strip() for name in allowed.split(",")]
        return {"SGLANG_PLUGINS": f"{allowed},eyas"} if wanted else {}
    package = "eyas_plugin.external"
    if environment.get(_EXTERNAL, package) != package:
        raise UsageError(
            f"{_EXTERNAL}={environment[_EXTERNAL]} is set, and {source.label} takes a plugin in no other way: import "
            f"eyas_plugin.external.activate in a module of that package and start with --no-plugin, or unset it"
        )
    return {_EXTERNAL: package}


def profiling(source: EngineSource, folder: Path, steps: int) -> Profiling:
    """Nothing to launch it with: it takes everything with the request. By stage, so that it counts decode steps alone
    and writes them into a file of their own.
    """
    asked = {
        "output_dir": str(folder),
        "num_steps": steps,
        "activities": ["CPU", "GPU"],
        "profile_by_stage": True,
        "with_stack": False,
        "record_shapes": False,
    }
    return Profiling(asked=asked, whole="-DECODE")
