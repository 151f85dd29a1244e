"""What is asked: the built-in prompts, or those of a file, by task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from eyas.bench.prompts import BUILTIN
from eyas.core import UsageError
from eyas.training.conversation import Messages, question, up_to_the_last_question
from eyas.training.dataset import DataError
from eyas.training.sources import parse_conversation

NAMED = 5  # lines left out that are named, of each reason


@dataclass(frozen=True)
class Prompt:
    """``key`` is its name in journals and results: ``chat/3``."""

    key: str
    task: str
    messages: Messages

    @property
    def text(self) -> str:
        """For servers that take text and no messages."""
        return "\n\n".join(message["content"] for message in self.messages)


@dataclass(frozen=True)
class Workload:
    prompts: Mapping[str, Sequence[Prompt]]  # by task
    source: str
    left_out: tuple[str, ...] = ()  # reasons, each with how often and where

    @property
    def notes(self) -> list[str]:
        return [f"prompts left out of {self.source}: {reason}" for reason in self.left_out]

    @property
    def digest(self) -> str:
        asked = [[prompt.key, prompt.messages] for prompts in self.prompts.values() for prompt in prompts]
        return sha256(json.dumps(asked).encode()).hexdigest()

    def only(self, fitting: Mapping[str, Sequence[Prompt]], left_out: Sequence[str]) -> Workload:
        """What of it can be asked. Raises UsageError where nothing is left."""
        kept = {task: prompts for task, prompts in fitting.items() if prompts}
        workload = Workload(kept, self.source, (*self.left_out, *left_out))
        if not kept:
            why = "; ".join(workload.left_out) or "nothing is in it"
            raise UsageError(f"{self.source} leaves no prompt to ask: {why}.")
        return workload


def builtin(tasks: Sequence[str] = ()) -> Workload:
    """The project's own prompts, of these tasks (all by default)."""
    for task in tasks:
        if task not in BUILTIN:
            raise UsageError(f"There are no built-in prompts for {task!r}: choose from {', '.join(BUILTIN)}.")
    chosen = {task: _numbered(task, [question(text) for text in BUILTIN[task]]) for task in tasks or BUILTIN}
    return Workload(chosen, "the built-in prompts")


def from_file(path: Path) -> Workload:
    """Those of JSON lines (messages, ShareGPT conversations or prompt): of a conversation all up to its last question.

    A line that is none of this is left out, counted and named. Raises DataError for a file that cannot be read,
    UsageError where no line is left.
    """
    try:
        content = path.read_bytes()  # once: it may be a pipe
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    found, wrong = list[Messages](), dict[str, list[int]]()
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            wrong.setdefault("empty", []).append(number)
            continue
        try:
            conversation = parse_conversation(path, number, line)
        except DataError as error:
            reason = "not JSON" if "is not JSON" in str(error) else "of no known shape"
            wrong.setdefault(reason, []).append(number)
            continue
        if conversation.problem:
            wrong.setdefault(conversation.problem, []).append(number)
            continue
        messages = up_to_the_last_question(conversation.messages)
        if all(_is_text(message["content"]) for message in messages):
            found.append(messages)
        else:
            wrong.setdefault("with half a character (a lone surrogate)", []).append(number)
    workload = Workload({}, f"{path.name} (SHA-256 {sha256(content).hexdigest()[:12]})")
    return workload.only({path.stem: _numbered(path.stem, found)}, [_named(*entry) for entry in wrong.items()])


def _named(reason: str, lines: Sequence[int]) -> str:
    shown = ", ".join(map(str, lines[:NAMED])) + (", ..." if len(lines) > NAMED else "")
    return f"{len(lines)} {reason} (line{'s' if len(lines) > 1 else ''} {shown})"


def _numbered(task: str, conversations: Sequence[Messages]) -> tuple[Prompt, ...]:
    return tuple(Prompt(f"{task}/{n}", task, messages) for n, messages in enumerate(conversations, start=1))


def _is_text(content: str) -> bool:
    """JSON may hold halves of characters, which cannot be sent."""
    try:
        content.encode()
    except UnicodeEncodeError:
        return False
    return True


def chosen(prompts: Sequence[Prompt], count: int, turn: int) -> list[Prompt]:
    """``count`` prompts for round ``turn``, going on where the round before ended: new ones as long as there are any,
    since a server remembers what it has read.
    """
    return [prompts[(turn * count + n) % len(prompts)] for n in range(count)]
