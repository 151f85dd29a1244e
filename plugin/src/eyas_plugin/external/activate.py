"""Imported by SGLang's registry of models while that is being imported itself: it is all there, but for its end."""

import sys

from eyas_plugin.request import active, trace

if active():
    from eyas_plugin import sglang

    sglang.hook(sys.modules[sglang.REGISTRY])
if trace():
    from eyas_plugin import trace_sglang

    trace_sglang.activate()
