"""Where prompts come from, and what the target gets to see of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eyas.core import UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

    from eyas.engine.llm import LLM, Prompt

# For --compare without PROMPT: answers of different kinds, since speculation gains differently on them.
DEMO = (
    "List five birds of prey with one fact about each.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Sara has 3 boxes with 4 apples each and eats 2 apples. How many are left? Think step by step.",
    "Rewrite as a formal e-mail: hey, can't come tomorrow, sorry, let's meet on friday instead",
)
DEMO_TOKENS = 64


@dataclass(frozen=True)
class Asking:
    """How a text becomes a prompt: as it is, or as a message, with a system message before and images beside it."""

    raw: bool = False
    system: str | None = None
    images: Sequence[Image] = ()

    def opening(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.system}] if self.system is not None else []

    def message(self, text: str, images: Sequence[Image] = ()) -> dict[str, Any]:
        if not images:
            return {"role": "user", "content": text}
        shown = [{"type": "image", "image": image} for image in images]
        return {"role": "user", "content": [*shown, {"type": "text", "text": text}]}

    def prompt(self, llm: LLM, text: str) -> Prompt:
        """Messages for a target that has a chat template (or to be told that it has none), else the text itself."""
        chats = getattr(llm.tokenizer, "chat_template", None) or self.system is not None or self.images
        return text if self.raw or not chats else [*self.opening(), self.message(text, self.images)]


def stdin_is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def read_prompt(given: str | None, *, raw: bool = False) -> str:
    """The prompt as given, or all of stdin for "-" or nothing. UsageError for an empty one and for broken UTF-8."""
    text = read_stdin() if given in (None, "-") else given
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError("The prompt is not valid UTF-8.") from error
    if not (text if raw else text.strip()):
        raise UsageError("The prompt is empty.")
    return text


def read_stdin() -> str:
    """Without the line end that echo and editors put behind the last line."""
    if sys.stdin is None:
        raise UsageError("There is no PROMPT, and stdin is closed.")
    if sys.stdin.isatty():
        print("The prompt, then Ctrl-D:", file=sys.stderr)
    return sys.stdin.buffer.read().decode(errors="surrogateescape").removesuffix("\n").removesuffix("\r")
