"""Runs in an environment of vLLM: makes tiny targets of real classes and does to them what the model runners do.

in_vllm.py DRAFTER TARGET ASKED [TARGET ASKED ...]: prints one JSON object a target, with EYAS_PLUGIN as ASKED says; "-"
is without. Nothing is loaded, nothing is served.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from types import SimpleNamespace
from typing import Any


def main(drafter: str, *cases: str) -> None:
    from vllm import plugins
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # it only saves a GPU from being touched
    for target, asked in zip(cases[::2], cases[1::2], strict=True):
        os.environ["EYAS_PLUGIN"] = "" if asked == "-" else asked
        plugins.plugins_loaded = False  # as in a process that has just begun
        print("\n" + json.dumps(said_of(target, drafter)), flush=True)


def said_of(target: str, drafter: str) -> dict[str, Any]:
    config = engine_config(target, drafter)
    try:
        model = construct(config)
    except Exception as error:
        return {"construct": f"{type(error).__name__}: {error}"}
    return {"construct": "", **as_the_runners(config, model), **as_the_proposer(model)}


def engine_config(target: str, drafter: str, **more: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(  # runs the entry points, like every server
        model=target,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        max_model_len=64,
        speculative_config={"method": "eagle3", "model": drafter, "num_speculative_tokens": 2},
        **more,
    )
    return arguments.create_engine_config()


def construct(config: Any) -> Any:
    """As a worker does it (v1/worker, model_loader/base_loader.py): one rank, and what is before the weights."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
        model_parallel_is_initialized,
    )
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        if not model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
            initialize_model_parallel(1, 1)
        return initialize_model(vllm_config=config)


def as_the_runners(config: Any, model: Any) -> dict[str, Any]:
    """vLLM's own code of both model runners, on this model."""
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import set_eagle3_aux_hidden_state_layers
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner = SimpleNamespace(
        use_aux_hidden_state_outputs=True,
        get_model=lambda: model,
        model=model,
        speculative_config=config.speculative_config,
    )
    runner._get_eagle3_aux_layers_from_config = lambda: GPUModelRunner._get_eagle3_aux_layers_from_config(runner)
    said = {}
    calls = {
        "v1": lambda: GPUModelRunner._setup_eagle3_aux_hidden_state_outputs(runner),
        "v2": lambda: set_eagle3_aux_hidden_state_layers(model, config.speculative_config),
    }
    for name, call in calls.items():
        try:
            call()
            said[name] = list(model.get_language_model().model.aux_hidden_state_layers)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def as_the_proposer(model: Any) -> dict[str, Any]:
    """What v1/spec_decode/llm_base_proposer.py reads of a multimodal target, by the branch for most classes."""
    inner = model.get_language_model()
    return {
        "image_token_index": getattr(model.config, "image_token_index", None),
        "embedding": list(inner.model.embed_tokens.weight.shape),
        "head": list(inner.lm_head.weight.shape),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
