"""EAGLE-3 for wrappers that SGLang and vLLM run. Importing this imports nothing."""

__version__ = "0.1.0"
