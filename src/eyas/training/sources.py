"""Prompts and conversations from JSON lines: messages, ShareGPT, or prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.training.conversation import Messages
from eyas.training.dataset import DataError

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
SHAPES = '{"messages": [{"role", "content"}, ...]}, {"conversations": [{"from", "value"}, ...]} or {"prompt": "..."}'


@dataclass(frozen=True)
class Conversation:
    """Line ``line`` of a file. ``problem`` says why it cannot be answered, empty where it can."""

    line: int
    messages: Messages
    problem: str = ""


def read_conversations(path: Path) -> Iterator[Conversation]:
    """Every conversation of a file, blank lines left out.

    Raises DataError for a file that is none of this, naming the line. A conversation that no target could answer is
    only marked: in a big file there always is one.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield parse_conversation(path, number, line)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error


def file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    return digest.hexdigest()


def parse_conversation(path: Path, number: int, line: bytes) -> Conversation:
    """One line. Raises DataError where it is not JSON, or none of these shapes."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {number} is not JSON ({error}): every line is one of {SHAPES}.") from error
    entries = _entries(content)
    if entries is None:
        found = ", ".join(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
        raise DataError(f"{path}, line {number}: found {found[:80]!r}, expected {SHAPES}.")
    messages = [_message(entry) for entry in entries]
    known = [message for message in messages if message is not None]
    problem = "roles or contents that are not known" if len(known) < len(messages) else order_problem(known)
    return Conversation(number, known, problem)


def _entries(content: Any) -> Sequence[Any] | None:
    if not isinstance(content, Mapping):
        return None
    for key in ("messages", "conversations", "conversation", "prompt"):
        if isinstance(entries := content.get(key), list):
            return entries
    return [{"role": "user", "content": content["prompt"]}] if isinstance(content.get("prompt"), str) else None


def _message(entry: Any) -> dict[str, str] | None:
    if not isinstance(entry, Mapping):
        return None
    role, text = entry.get("role", entry.get("from")), entry.get("content", entry.get("value"))
    if isinstance(text, list):  # parts: text alone will do
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in text]
        text = "".join(parts) if parts and all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]
    if role not in ROLES or not isinstance(text, str):
        return None
    return {"role": ROLES[role], "content": text}


def order_problem(messages: Messages) -> str:
    """System first if at all, then user and assistant in turn, and a question in every user's turn."""
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns:
        return "conversations without a question"
    if any(role != ("user", "assistant")[n % 2] for n, role in enumerate(turns)):
        return "conversations out of order"
    if any(m["role"] == "user" and not m["content"].strip() for m in messages):
        return "conversations with an empty question"
    return ""
