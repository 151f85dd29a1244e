"""The one place where both engines come from an architecture to a class: ``resolve_model_cls`` of their registry.

What a class lacks is added there. It is the first time that the class is needed in a process, wherever its module is,
and nothing else of the engine has to be known.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from eyas_plugin.marker import Marker
from eyas_plugin.request import AUTO, asked, names
from eyas_plugin.wrappers import CannotServeEagle3, Interface, amend, examine

log = logging.getLogger("eyas_plugin")
_HOOKED = "hooked_by_eyas"


@dataclass(frozen=True)
class Engine:
    """``is_target``: whether an architecture, resolved with these keywords, may be the target of EAGLE-3 here.

    ``speculates``: whether this process is making the models of a pair with EAGLE-3. Both are asked for ``auto`` only.
    ``repair`` mends what is wrong with a class that is asked for, whatever it lacks, and says what.
    """

    marker: Marker
    interface: Callable[[], Interface]
    is_target: Callable[..., bool]
    speculates: Callable[[], bool]
    repair: Callable[[type], list[str]] = lambda cls: []


def hook(registry: ModuleType, engine: Engine) -> None:
    """Once for a registry, however often it is called. Raises RuntimeError where the engine has no such place."""
    cls: Any = type(getattr(registry, "ModelRegistry", None))
    resolve = getattr(cls, "resolve_model_cls", None)
    if resolve is None:
        where = f"{registry.__name__}.ModelRegistry.resolve_model_cls"
        version = f"{engine.marker.engine} {engine.marker.version}"
        raise RuntimeError(f"eyas-plugin does not know this {version}, which has no {where}: use eyas patch")
    if getattr(resolve, _HOOKED, False):
        return

    @functools.wraps(resolve)
    def resolve_model_cls(self: Any, *args: Any, **kwargs: Any) -> Any:
        model, architecture = answer = resolve(self, *args, **kwargs)
        wanted = names()
        named = bool({model.__name__, architecture} & wanted)
        if named or (AUTO in wanted and engine.is_target(architecture, **kwargs)):
            _prepare(model, engine, named)
        elif model.__name__ not in engine.marker.left_alone:
            log.info("eyas-plugin leaves %s as it is: EYAS_PLUGIN asks for %s", model.__name__, asked())
            engine.marker.left_alone.append(model.__name__)
            engine.marker.write()
        return answer

    setattr(resolve_model_cls, _HOOKED, True)
    cls.resolve_model_cls = resolve_model_cls
    engine.marker.write()


def _prepare(cls: type, engine: Engine, named: bool) -> None:
    marker, interface = engine.marker, engine.interface()
    if cls.__name__ in marker.classes:
        return
    entry: dict[str, Any] = {"added": [], "repaired": []}
    marker.classes[cls.__name__] = entry

    def examined(model: Any, methods: tuple[str, ...]) -> None:
        if not named and not engine.speculates():
            return  # it may be served without speculation, whatever it cannot do
        try:
            entry["through"] = examine(model, methods, interface)
        except CannotServeEagle3 as error:
            marker.refused = str(error)
            raise
        finally:
            marker.write()

    entry["added"] += amend(cls, interface, examined)
    entry["repaired"] += engine.repair(cls)
    if entry["added"] or entry["repaired"]:
        done = ", ".join((*entry["added"], *entry["repaired"]))
        log.warning("eyas-plugin: %s of %s was given %s", cls.__name__, cls.__module__, done)
    marker.write()
