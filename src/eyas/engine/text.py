"""Text from tokens as they come: never half a character, never a piece of a stop string."""

from __future__ import annotations

from typing import Any


class TextStream:
    """Incremental detokenisation of one sequence with stop strings."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = (), skip_special_tokens: bool = True):
        self._tokenizer, self._stop, self._skip = tokenizer, stop, skip_special_tokens
        self._ids: list[int] = []
        self._prefix = self._read = 0  # ids[prefix:read] are decoded again as context for what follows them
        self._held = ""  # could still become a stop string
        self.stopped: str | None = None  # the stop string that ended it

    def push(self, token: int, may_stop: bool = True) -> str:
        """Adds a token and returns the text that is now certain; empty while a character or stop string is open.

        Sets ``stopped`` when a stop string is complete: the text before it is returned, the rest is dropped. With
        ``may_stop`` false (before min_tokens) stop strings are text like any other.
        """
        self._ids.append(token)
        context = self._decode(self._ids[self._prefix : self._read])
        whole = self._decode(self._ids[self._prefix :])
        if len(whole) <= len(context) or whole.endswith("\ufffd"):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return self._release(whole[len(context) :], may_stop)

    def flush(self) -> str:
        """The end of the text: what was held back, and an unfinished character as U+FFFD."""
        if self.stopped is not None:
            return ""
        context = self._decode(self._ids[self._prefix : self._read])
        rest = self._decode(self._ids[self._prefix :])[len(context) :]
        text = self._release(rest, may_stop=True) + self._held
        self._held = ""
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)

    def _release(self, new: str, may_stop: bool) -> str:
        text = self._held + new
        if not may_stop:
            return text
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped = min(found, key=lambda pair: pair[0])  # of several the first in the text
            self._held = ""
            return text[:at]
        keep = max((open_suffix(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def open_suffix(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` with which ``stop`` begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
