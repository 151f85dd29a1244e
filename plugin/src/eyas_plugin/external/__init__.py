"""For SGLang without plugins: ``SGLANG_EXTERNAL_MODEL_PACKAGE=eyas_plugin.external``.

Its registry of models (models/registry.py) imports every module of that package right after its own models, and takes
the classes in ``EntryClass``, of which there are none here.
"""
