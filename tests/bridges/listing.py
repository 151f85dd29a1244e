"""An independent listing of an engine's models: regular expressions over all of them, nothing of Eyas."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from zipfile import ZipFile

CLASS = re.compile(r"^class (\w+)(?:\(([^)]*)\))?:", re.MULTILINE)
METHOD = re.compile(r"^    def (\w+)\(", re.MULTILINE)
INNER = re.compile(r"self\.(language_model|llm|model|thinker) = (\w+)\(")


class Listing:
    """Classes by name: where several have one name, the module that asks comes first."""

    def __init__(self, wheel: ZipFile, folders: Iterable[str]):
        self.texts = {
            name: wheel.read(name).decode("utf-8-sig")
            for name in wheel.namelist()
            if name.endswith(".py") and name.startswith(tuple(folders)) and not name.endswith("/config.py")
        }
        self.classes: dict[str, list[tuple[str, list[str], set[str], str]]] = {}
        for module, text in self.texts.items():
            starts = [*CLASS.finditer(text)]
            for match, after in zip(starts, [*starts[1:], None], strict=False):
                body = text[match.end() : after.start() if after else len(text)]
                bases = [b.split("[")[0].split("=")[-1].strip().split(".")[-1] for b in (match[2] or "").split(",")]
                entry = module, [b for b in bases if b], set(METHOD.findall(body)), body
                self.classes.setdefault(match[1], []).append(entry)

    def entry(self, name: str, module: str = "") -> tuple[str, list[str], set[str], str] | None:
        found = self.classes.get(name, [])
        return next((e for e in found if e[0] == module), found[0] if found else None)

    def methods(self, name: str, module: str = "", depth: int = 0) -> set[str]:
        found = self.entry(name, module)
        if found is None or depth > 20:
            return set()
        inherited = [self.methods(base, found[0], depth + 1) for base in found[1] if base != name]
        return found[2].union(*inherited)

    def bases(self, name: str, module: str = "", depth: int = 0) -> set[str]:
        found = self.entry(name, module)
        if found is None or depth > 20:
            return set()
        return set(found[1]).union(*(self.bases(base, found[0], depth + 1) for base in found[1] if base != name))

    def inner(self, name: str, module: str = "") -> set[str]:
        """Classes of the models that a wrapper makes in its own body."""
        found = self.entry(name, module)
        return {cls for _, cls in INNER.findall(found[3])} if found else set()

    def entry_classes(self) -> dict[str, str]:
        """SGLang: architecture and module."""
        found = {}
        for module, text in self.texts.items():
            if len(PurePosixPath(module).parts) == 4:
                for listed in re.findall(r"^EntryClass\b[^=]*=\s*(\[[^\]]*\]|\w+)", text, re.MULTILINE):
                    found |= dict.fromkeys(re.findall(r"[A-Za-z_]\w*", re.sub(r"#.*", "", listed)), module)
        return found

    def table(self, name: str) -> dict[str, str]:
        """vLLM: architecture and class of one table of its registry."""
        text = self.texts["vllm/model_executor/models/registry.py"]
        body = re.search(rf"^{name} = {{\n(.*?)^}}", text, re.MULTILINE | re.DOTALL)
        assert body
        rows = re.sub(r"^ *#.*\n", "", body[1], flags=re.MULTILINE)
        return dict(re.findall(r'"(\w+)":\s*\(\s*"[\w.]+",\s*"(\w+)"', rows))
