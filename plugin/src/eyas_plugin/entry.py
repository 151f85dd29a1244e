"""What engines call in each of their processes. Does nothing unless EYAS_PLUGIN or EYAS_PLUGIN_TRACE asks for it.

SGLang catches and logs what a plugin raises, vLLM passes it on; so nothing is decided here. What a model cannot do is
said when it is made, where both engines end.
"""

from __future__ import annotations

from eyas_plugin.request import active, trace


def sglang() -> None:
    """The entry point of the group ``sglang.srt.plugins``."""
    if active():
        from eyas_plugin import sglang as engine

        engine.activate()
    if trace():
        from eyas_plugin import trace_sglang

        trace_sglang.activate()


def vllm() -> None:
    """The entry point of the group ``vllm.general_plugins``."""
    if active():
        from eyas_plugin import vllm as engine

        engine.activate()
    if trace():
        from eyas_plugin import trace_vllm

        trace_vllm.activate()
