"""SGLang's real model modules on a machine without its compiled kernels: imports of those alone find stand-ins.

Imported first thing by the scripts that run in an environment of SGLang. Everything else is the real thing: SGLang as
published, PyTorch, and the transformers that this SGLang pins.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Compiled for GPUs (sgl_kernel, torchvision as PyPI has it), or for notebooks only (IPython).
STANDING_IN = ("sgl_kernel", "torchvision", "IPython")


class Anything:
    """Whatever a module level asks of a kernel: called, decorated with, indexed; false where it is asked for."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __getitem__(self, key: object) -> Any:
        return self

    def __or__(self, other: object) -> Any:
        return object

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[type, ...]) -> tuple[type, ...]:
        return (object,)

    def __bool__(self) -> bool:
        return False


class Kernels(ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Finder(MetaPathFinder, Loader):
    """Only for SGLang: transformers and torch must not believe that these are installed."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package = fullname.partition(".")[0]
        if package not in STANDING_IN or (package not in sys.modules and not _asked_by_sglang()):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Kernels(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _asked_by_sglang() -> bool:
    frame = sys._getframe(2)
    while frame.f_back and "importlib._bootstrap" in frame.f_code.co_filename:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).startswith("sglang")


sys.meta_path.append(Finder())
