"""Whether a drafter's tokenizer files, where it has any, are those of the target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from eyas.bridges.report import Problem
from eyas.core import EyasError
from eyas.files import read_json

_MAX = 100_000_000


def problems(target: Path, drafter: Path) -> Iterator[Problem]:
    """Engines use the target's files only, so a difference says that the drafter was trained on other text."""
    yield from _vocabulary(target / "tokenizer.json", drafter / "tokenizer.json")
    here, there = _template(drafter), _template(target)
    if here is not None and there is not None and here.split() != there.split():
        yield Problem(
            "silent",
            "the chat template in the drafter's folder is not the target's",
            "it was trained on conversations that look different: lower acceptance",
            "train on the template that is served, or serve the one it was trained on (--chat-template)",
        )


def _vocabulary(target: Path, drafter: Path) -> Iterator[Problem]:
    if not (target.is_file() and drafter.is_file()) or _same(target, drafter):
        return
    sizes, tables = [], []
    for file in (target, drafter):
        table = _tokens(_read(file))
        if table is None:
            yield Problem(
                "undecided", f"{file}: its vocabulary cannot be read", "the two tokenizers cannot be compared"
            )
            return
        tables.append(table)
        sizes.append(len(table))
    differing = sum(tables[0].get(token) != index for token, index in tables[1].items())
    if differing:
        yield Problem(
            "silent",
            f"{drafter}: {differing} of {sizes[1]} tokens have another id in the target's, which has {sizes[0]}",
            "it drafts tokens that mean something else to the target: acceptance near zero",
            "take the drafter of this target",
        )
    elif sizes[0] != sizes[1]:
        yield Problem(
            "note",
            f"{drafter}: its {sizes[1]} tokens are the target's, which has {sizes[0] - sizes[1]} more",
            "the drafter was trained without those: text that holds them may be drafted less well",
        )


def _tokens(content: Any) -> dict[str, int] | None:
    try:
        vocab = content["model"]["vocab"]
        table = vocab if isinstance(vocab, dict) else {item[0]: i for i, item in enumerate(vocab)}
        return {**table, **{added["content"]: added["id"] for added in content.get("added_tokens", [])}}
    except (KeyError, TypeError, IndexError, AttributeError):
        return None


def _template(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file() and file.stat().st_size < _MAX:
        return file.read_text(encoding="utf-8", errors="replace")
    template = (_read(folder / "tokenizer_config.json") or {}).get("chat_template")
    return template if isinstance(template, str) else None


def _read(file: Path) -> dict[str, Any] | None:
    with suppress(EyasError):
        return read_json(file, EyasError, limit=_MAX)
    return None


def _same(one: Path, other: Path) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as a, other.open("rb") as b:
        while chunk := a.read(1 << 20):
            if chunk != b.read(1 << 20):
                return False
    return True
