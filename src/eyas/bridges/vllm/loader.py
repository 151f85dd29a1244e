"""vLLM's AutoWeightsLoader, which is too dynamic to be run: who gets a tensor, by its name."""

from __future__ import annotations

from typing import Any

from eyas.bridges.code.interpreter import Interpreter
from eyas.bridges.code.values import UNKNOWN, Instance, Leaf, Nothing, Parameter, Raised, Tensor

_FILE = "model_executor/models/utils.py"


class Loader:
    """Walks down the modules, hands over to a ``load_weights`` on the way, and refuses what has no place."""

    def __init__(self, interpreter: Interpreter, module: Any):
        self._interpreter, self._module = interpreter, module

    def load_weights(self, weights: Any, mapper: Any = None, **options: Any) -> None:
        for name, tensor in weights if isinstance(weights, list) else list(weights):
            place = self._mapped(name, mapper)
            if isinstance(place, str) and isinstance(tensor, Tensor):
                self._place(self._module, place, place, tensor)
            elif place is None and isinstance(tensor, Tensor):
                tensor.used = False

    def _mapped(self, name: str, mapper: Any) -> Any:
        """The name after the model's WeightsMapper, by its own code; None where it leaves the tensor out."""
        if "rotary_emb.inv_freq" in name:
            return None
        for method in ("map_name", "_map_name"):
            if isinstance(mapper, Instance) and self._interpreter.has(mapper, method) is True:
                return self._interpreter.method(mapper, method, name)
        return name

    def _place(self, module: Any, path: str, whole: str, tensor: Tensor) -> None:
        if isinstance(module, Leaf):
            self._fill(module, path, whole, tensor)
            return
        head, _, rest = path.partition(".")
        child = self._child(module, head)
        if isinstance(child, Instance) and self._interpreter.has(child, "load_weights") is True:
            self._interpreter.method(child, "load_weights", [(rest, tensor)])
        elif isinstance(child, Instance | Leaf | list):
            self._place(child, rest, whole, tensor)
        elif not isinstance(child, Nothing):
            self._refuse(whole, tensor)

    def _child(self, module: Any, name: str) -> Any:
        if isinstance(module, list):
            return module[int(name)] if name.isdigit() and int(name) < len(module) else None
        return module.attrs.get(name) if isinstance(module, Instance) else UNKNOWN

    def _fill(self, leaf: Leaf, name: str, whole: str, tensor: Tensor) -> None:
        parameter = leaf.parameters.get(name)
        if isinstance(parameter, Parameter):
            parameter.filled = True
            self._interpreter.filled.append((parameter, tensor))
        else:
            self._refuse(whole, tensor)

    def _refuse(self, name: str, tensor: Tensor) -> None:
        tensor.used = False
        if not name.endswith(".bias"):  # those are left out without a word
            kind = self._module.ref.name if isinstance(self._module, Instance) else "the drafter"
            raise Raised(
                "ValueError", f"There is no module or parameter named {name!r} in {kind} (for {tensor.name})", _FILE
            )
