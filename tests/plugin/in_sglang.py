"""Runs in an environment of SGLang: makes a tiny target of a real class and does to it what the runner does.

in_sglang.py DRAFTER TARGET MODULE CLASS: prints one JSON object, before and after SGLang's own way to the class, which
is where the plugin comes in. Nothing is loaded, nothing is served.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import without_kernels  # noqa: F401  (before anything of SGLang)

PLUGINS = "sglang.srt.plugins"


def main(drafter: str, target: str, module: str, cls: str) -> dict[str, Any]:
    arguments, recent = begin(drafter, target)
    run = as_the_recent_runner if recent else as_the_older_runner
    before = run(as_imported(arguments, module, cls))
    try:
        return {"before": before, "after": run(construct(arguments))}
    except Exception as error:
        return {"before": before, "after": f"{type(error).__name__}: {error}"}


def begin(drafter: str, target: str) -> tuple[Any, bool]:
    """The server's arguments, and a process that may make models; whether it is a version with plugins."""
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=target,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=drafter,
        speculative_num_steps=3,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=4,
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        attention_backend="torch_native",
    )
    recent = find_spec(PLUGINS) is not None
    if recent:  # managers/scheduler.py, first of all
        from sglang.srt.plugins import load_plugins

        load_plugins()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    (_begin_recent if recent else _begin_older)(arguments, address)
    return arguments, recent


def as_imported(arguments: Any, module: str, cls: str) -> Any:
    from sglang.srt.configs.model_config import ModelConfig

    return getattr(import_module(module), cls)(ModelConfig.from_server_args(arguments).hf_config)


def _begin_older(arguments: Any, address: str) -> None:
    """As ModelRunner.init_torch_distributed, on one rank."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.server_args import set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(arguments)
    init_distributed_environment(backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=address)
    initialize_model_parallel()
    initialize_dp_attention(arguments, ModelConfig.from_server_args(arguments))


def _begin_recent(arguments: Any, address: str) -> None:
    """As run_scheduler_process and its bootstrap, on one rank."""
    from sglang.srt.distributed import bootstrap
    from sglang.srt.runtime_context import SpawnRanks, publish

    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    bootstrap._init_parallel_groups(backend="gloo", dist_init_method=address, server_args=arguments, gpu_id=0)


def construct(arguments: Any) -> Any:
    """SGLang's own way from a config to a model: what is before the weights."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import _initialize_model

    return _initialize_model(ModelConfig.from_server_args(arguments), LoadConfig())


def said(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def layers(model: Any) -> list[int]:
    assert model.language_model.capture_aux_hidden_states  # what makes it give the states to its logits processor
    return list(model.language_model.model.layers_to_capture)


def shapes(pair: Any) -> list[list[int]]:
    return [list(tensor.shape) for tensor in pair]


def as_the_older_runner(model: Any) -> dict[str, Any]:
    """cuda_graph_runner.py, then ModelRunner.initialize, then eagle_worker.py."""
    return {
        "graphs": said(lambda: model.set_eagle3_layers_to_capture() or layers(model)),
        "runner": said(lambda: model.set_eagle3_layers_to_capture([1, 3, 6]) or layers(model)),
        "default": said(lambda: model.set_eagle3_layers_to_capture(None) or layers(model)),
        "worker": said(lambda: shapes(model.get_embed_and_head())),
    }


def as_the_recent_runner(model: Any) -> dict[str, Any]:
    """pp_draft_embedding.py, then attention_backend_setup.py: the functions themselves."""
    from sglang.srt.model_executor.model_runner_components.attention_backend_setup import (
        configure_aux_hidden_state_capture,
    )
    from sglang.srt.speculative.pp_draft_embedding import resolve_target_embed_and_head

    def configure() -> list[int]:
        configure_aux_hidden_state_capture(
            model=model,
            eagle_use_aux_hidden_state=True,
            eagle_aux_hidden_state_layer_ids=[1, 3, 6],
            dflash_use_aux_hidden_state=False,
            dflash_target_layer_ids=None,
            is_dspark=False,
        )
        return layers(model)

    return {
        "worker": said(lambda: shapes(resolve_target_embed_and_head(model))),
        "runner": said(configure),
    }


if __name__ == "__main__":
    print("\n" + json.dumps(main(*sys.argv[1:])))
