"""What a drafter is fed and answers inside the engine, one JSON line a call, for whoever compares it (eyas probe).

EYAS_PLUGIN_TRACE names a folder. Each process writes PID.jsonl there, and only while the folder exists: whoever wants a
trace makes it once the engine is warm, and asks for one greedy answer. Engines must run eagerly: graphs and compiled
code hide the calls. Nothing that the engine computes is changed.

    {"call": "drafter", "engine": "vllm", "class": "Eagle3LlamaForCausalLM", "dtype": "bfloat16", "config": {...}}
    {"call": "fuse", "states": [[SKETCH, SKETCH, SKETCH], ...]}       a sketch for each captured layer of each row
    {"call": "forward", "tokens": [...], "positions": [...], "entering": [SKETCH, ...], "embedding": [...],
     "normed": [...]}                                                 what enters the first layer; what the head takes
    {"call": "logits", "top": [[[ID, LOGIT], ...], ...], "normed": [...]}          ids of the target's vocabulary

A sketch is a state's norm and 16 sums of its values with signs that depend on their index alone: two states are about
as far from each other as their sketches are, whichever machine made them.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from eyas_plugin.imports import when_imported
from eyas_plugin.request import trace

SUMS, TOP = 16, 8
_TRACED = "traced_by_eyas"
_CONFIG = ("rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps", "norm_before_residual", "norm_output")


def watch(package: ModuleType, folder: str, wrap: Callable[[type], None]) -> None:
    """``wrap`` gets every class of the engine's EAGLE-3 drafters, which are in modules of that name."""
    for file in sorted((Path(package.__path__[0]) / folder).glob("*eagle3*.py")):
        name = ".".join((package.__name__, *Path(folder).parts, file.stem))
        when_imported(name, functools.partial(_each_class, wrap))


def _each_class(wrap: Callable[[type], None], module: ModuleType) -> None:
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            wrap(value)


def replace(cls: type, name: str, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """The method ``name``, inherited ones too, by what ``made`` makes of it; once."""
    method = getattr(cls, name)
    if not getattr(method, _TRACED, False):
        new = functools.wraps(method)(made(method))
        setattr(new, _TRACED, True)
        setattr(cls, name, new)


def recording() -> bool:
    return bool(trace()) and Path(trace()).is_dir()


def write(call: str, **facts: Any) -> None:
    with Path(trace(), f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"call": call, **facts}) + "\n")


def write_drafter(engine: str, model: Any) -> None:
    """Once for each file: who drafts, and what of its config decides how."""
    if Path(trace(), f"{os.getpid()}.jsonl").exists():
        return
    config = {key: value for key in _CONFIG if (value := getattr(model.config, key, None)) is not None}
    dtype = str(model.model.norm.weight.dtype).removeprefix("torch.")
    write("drafter", engine=engine, **{"class": type(model).__name__}, dtype=dtype, config=config)


def write_states(states: Any, config: Any) -> None:
    """``states`` [rows, layers * width], concatenated in layer order as the engine feeds them."""
    width = getattr(config, "target_hidden_size", None) or config.hidden_size
    parts = states.split(width if states.shape[-1] % width == 0 else states.shape[-1], dim=-1)
    write("fuse", states=list(zip(*(sketches(part) for part in parts), strict=True)))


def write_logits(logits: Any, normed: Any = None, ids: Any = None) -> None:
    """``logits`` [rows, vocabulary]; ``ids`` [vocabulary] are the target's ids, where they are not the columns."""
    values, columns = logits.detach().float().cpu().topk(min(TOP, logits.shape[-1]), dim=-1)
    columns = columns if ids is None else ids.cpu()[columns]
    top = [list(zip(*row, strict=True)) for row in zip(columns.tolist(), values.tolist(), strict=True)]
    write("logits", top=top, **({} if normed is None else {"normed": sketches(normed)}))


def watched(network: Any, run: Callable[[], Any], tokens: Any) -> Any:
    """What ``run`` returns; writes what enters the first layer of ``network`` meanwhile, and what its norm gives."""
    seen: dict[str, Any] = {}
    layer = _first_layer(network)

    def entering(_: Any, args: Any, kwargs: Any) -> None:
        given = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
        positions = given["positions"]
        seen["positions"] = (positions if positions.dim() == 1 else positions[0]).tolist()
        seen["embedding"], seen["entering"] = sketches(given["embeds"]), sketches(given["hidden_states"])

    def leaving(_: Any, args: Any, output: Any) -> None:
        seen["normed"] = sketches(output[0] if isinstance(output, tuple) else output)

    hooks = (
        layer.register_forward_pre_hook(entering, with_kwargs=True),
        network.norm.register_forward_hook(leaving),
    )
    try:
        result = run()
    finally:
        for hook in hooks:
            hook.remove()
    if "entering" in seen:  # not for an idle batch
        write("forward", tokens=tokens.tolist(), **seen)
    return result


def _first_layer(network: Any) -> Any:
    wanted = {"positions", "embeds", "hidden_states"}
    found = (m for m in network.modules() if wanted <= set(inspect.signature(m.forward).parameters))
    layer = next(found, None)
    if layer is None:
        raise RuntimeError(f"eyas-plugin cannot trace {type(network).__name__}: no layer of it takes {sorted(wanted)}")
    return layer


def sketches(states: Any) -> list[list[float]]:
    """The norm of each row of ``states`` [rows, width] and its sums."""
    import torch

    values = states.detach().to("cpu", torch.float32)
    sums = values @ _signs(values.shape[-1]) / SUMS**0.5
    return [[float(f"{v:.6g}") for v in row] for row in torch.cat((values.norm(dim=-1)[:, None], sums), -1).tolist()]


@functools.cache
def _signs(width: int) -> Any:
    """1 and -1, [width, SUMS], from a hash of each place: the same everywhere, and in eyas.bridges.reference."""
    import torch

    with torch.inference_mode(False):
        mixed = torch.arange(width * SUMS) * 2654435761 & 0xFFFFFFFF
        mixed = (mixed ^ mixed >> 16) * 2246822519 & 0xFFFFFFFF
        return (1 - 2 * ((mixed ^ mixed >> 13) & 1)).float().view(width, SUMS)
