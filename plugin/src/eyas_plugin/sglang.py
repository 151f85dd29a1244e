"""SGLang: what its runner and its draft worker ask of a target (model_runner.py, eagle_worker.py and their successors).

It may be an entry point (``sglang.srt.plugins``) or, in versions without plugins, a module of
``SGLANG_EXTERNAL_MODEL_PACKAGE``. Both come to the registry of models, in the scheduler's process.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from eyas_plugin import resolving
from eyas_plugin.imports import when_imported
from eyas_plugin.marker import Marker
from eyas_plugin.wrappers import Interface

REGISTRY = "sglang.srt.models.registry"
SET_LAYERS = "set_eagle3_layers_to_capture"
INTERFACE = Interface("SGLang", methods=(SET_LAYERS, "get_embed_and_head"), extra=("set_embed_and_head",), whole=True)
_UNSAID: Any = object()


def activate() -> None:
    """Imports nothing of SGLang: its models come when one is needed, and most processes never need one."""
    marker().write()
    when_imported(REGISTRY, hook)


def hook(registry: ModuleType) -> None:
    engine = resolving.Engine(marker(), lambda: INTERFACE, lambda name, **_: name in served(), speculates, repair)
    resolving.hook(registry, engine)


@functools.cache
def marker() -> Marker:
    return Marker("sglang", str(getattr(sys.modules.get("sglang"), "__version__", "unknown")))


def served() -> Collection[str]:
    """The architectures of this server's target, if it is served with EAGLE-3."""
    arguments = _server_arguments()
    if arguments is None or not speculates():
        return ()
    config = import_module("sglang.srt.configs.model_config").ModelConfig.from_server_args(arguments)
    return config.hf_config.architectures or ()


def speculates() -> bool:
    arguments = _server_arguments()
    return arguments is not None and str(arguments.speculative_algorithm).upper() == "EAGLE3"


def _server_arguments() -> Any:
    """The arguments of this server; None in a process that was not told them yet."""
    try:
        get = import_module("sglang.srt.runtime_context").get_server_args
    except ImportError:
        get = import_module("sglang.srt.server_args").get_global_server_args
    try:
        return get()
    except (ValueError, RuntimeError, AttributeError):  # what they raise for "not set yet"
        return None


def repair(cls: type) -> list[str]:
    """Graphs captured with the layers that the drafter names, where SGLang would take its default.

    The graph runner of 0.5.8 and 0.5.9 calls the setter without layers, and the runner names them only behind it:
    prefill and decoding then feed the drafter different states (pull request 22836). A call without layers means the
    drafter's here. Versions that never call it so are left alone.
    """
    if not hasattr(cls, SET_LAYERS) or not asks_without_layers():
        return []
    setter = getattr(cls, SET_LAYERS)

    @functools.wraps(setter)
    def set_eagle3_layers_to_capture(self: Any, layer_ids: list[int] | None = _UNSAID) -> Any:
        return setter(self, drafter_layers() if layer_ids is _UNSAID else layer_ids)

    setattr(cls, SET_LAYERS, set_eagle3_layers_to_capture)
    return ["the drafter's layers at graph capture"]


def asks_without_layers() -> bool:
    """Whether anything in this SGLang's model_executor calls the setter without layers."""
    folder = Path(str(import_module("sglang.srt.model_executor").__path__[0]))
    call = f".{SET_LAYERS}()".encode()
    return any(call in file.read_bytes() for file in folder.rglob("*.py"))


def drafter_layers() -> list[int] | None:
    """The layers in the drafter's config, as ModelRunner.__init__ reads them; None where it names none."""
    arguments = _server_arguments()
    if arguments is None or not arguments.speculative_draft_model_path:
        return None
    config = import_module("sglang.srt.configs.model_config").ModelConfig.from_server_args(
        arguments,
        model_path=arguments.speculative_draft_model_path,
        model_revision=arguments.speculative_draft_model_revision,
        is_draft_model=True,
    )
    said = getattr(config.hf_config, "eagle_config", None)
    return said.get("eagle_aux_hidden_state_layer_ids") if isinstance(said, dict) else None
