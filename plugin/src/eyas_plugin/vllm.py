"""vLLM: the protocol SupportsEagle3, which its model runners ask a target for once everything is loaded.

vLLM calls the entry point in every process: API server, engine core, workers, and where it inspects model classes.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from eyas_plugin import resolving
from eyas_plugin.imports import when_imported
from eyas_plugin.marker import Marker
from eyas_plugin.wrappers import Interface

REGISTRY = "vllm.model_executor.models.registry"
IMAGE_TOKEN = "image_token_index"
# What configs call the id of the token that stands for an image, or else for what they have in place of images.
_TOKENS = (r"^(image|img|media|vision)\w*token\w*_(id|index)$", r"^(video|audio|speech)\w*token\w*_(id|index)$")


def activate() -> None:
    """Imports nothing of vLLM: a process that forks or inspects must not have loaded its models."""
    marker().write()
    when_imported(REGISTRY, hook)


def hook(registry: ModuleType) -> None:
    resolving.hook(registry, resolving.Engine(marker(), interface, is_target, speculates))


@functools.cache
def marker() -> Marker:
    return Marker("vllm", str(getattr(sys.modules.get("vllm"), "__version__", "unknown")))


@functools.cache
def interface() -> Interface:
    """The members of this version's protocol."""
    members = dict(_members(import_module("vllm.model_executor.models.interfaces").SupportsEagle3))
    methods = tuple(name for name, value in members.items() if callable(value))
    flags = {name: value for name, value in members.items() if not callable(value)}
    return Interface("vLLM", methods, flags=flags, rehearse=rehearse)


def _members(protocol: type) -> Iterator[tuple[str, Any]]:
    for base in reversed(protocol.__mro__):
        if getattr(base, "_is_protocol", False):
            yield from ((name, value) for name, value in vars(base).items() if not name.startswith("_"))


def is_target(architecture: str, model_config: Any = None, **_: Any) -> bool:
    """Not a drafter, and not a model inside another, which are resolved while that one is made.

    A process may come to the class long before it knows whether it speculates, and keeps it.
    """
    if getattr(model_config, "runner_type", None) == "draft":
        return False
    config = _current_config()
    return config is None or architecture in (config.model_config.hf_config.architectures or ())


def speculates() -> bool:
    config = _current_config()
    speculative = config.speculative_config if config is not None else None
    return speculative is not None and speculative.method == "eagle3"


def _current_config() -> Any:
    return import_module("vllm.config").get_current_vllm_config_or_none()


def rehearse(model: Any, inner: Any) -> None:
    """Sets no layers at all, which asserts that what holds the decoder layers can capture them; and the image token."""
    inner.set_aux_hidden_state_layers(())
    if getattr(model, "supports_multimodal", False):
        name_image_token(model.config)


def name_image_token(config: Any) -> None:
    """The proposer copies ``image_token_index`` from a multimodal target's config, which may call it otherwise."""
    if hasattr(config, IMAGE_TOKEN):
        return
    known = {name: value for name, value in vars(config).items() if isinstance(value, int)}
    found = [value for pattern in _TOKENS for name, value in known.items() if re.match(pattern, name)]
    if not found:
        raise ValueError(
            f"its config names no token that stands for an image, which vLLM's proposer reads as {IMAGE_TOKEN}: add "
            f"--hf-overrides '{{\"{IMAGE_TOKEN}\": ID}}'"
        )
    setattr(config, IMAGE_TOKEN, found[0])
