"""Conversations as a target sees them: messages through its own chat template to token ids, and what it wrote in them.

What the target saw and what it wrote are kept apart from the beginning, so a loss mask is never guessed from finished
text. Where answers are given as text, the template says where they are, and the result is read back and compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jinja2 import TemplateError

from eyas.training.dataset import DataError

Messages = Sequence[Mapping[str, str]]


def question(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def up_to_the_last_question(messages: Messages) -> Messages:
    last = max(n for n, message in enumerate(messages) if message["role"] == "user")
    return list(messages[: last + 1])


MARK = "\u27e6eyas\u27e7"  # stands for a message's text: nothing a template trims, escapes or looks for


@dataclass(frozen=True)
class Turn:
    """One answer: the token ids the target saw before it, and those it wrote, the one that ends it included."""

    prompt: list[int]
    answer: list[int]


class Chat:
    """A target's chat template at work. ``end_ids`` are the tokens that end an answer, ``settings`` the template's own.

    Raises DataError where there is no template.
    """

    def __init__(self, tokenizer: Any, end_ids: Sequence[int], settings: Mapping[str, Any] | None = None):
        if not getattr(tokenizer, "chat_template", None):
            raise DataError("The target's tokenizer has no chat template, so there is no telling who wrote what.")
        self.tokenizer, self.end_ids, self.settings = tokenizer, tuple(end_ids), dict(settings or {})
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special), *end_ids}

    def prompt(self, messages: Messages) -> list[int]:
        """Token ids up to where the answer begins."""
        return self.encode(self.render(messages, answering=True))

    def user_turn(self, messages: Messages, begun: str = "") -> list[int]:
        """Token ids up to the middle of the user's next message, of which ``begun`` is written already."""
        return self.encode(self._around_user(messages)[0] + begun)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """What ends a message of the user: the token the template puts behind it, and whatever ends an answer."""
        after = self.encode(self._around_user(())[1])[:1]
        return tuple(sorted({*self.end_ids, *(i for i in after if i in self.special)}))

    @cached_property
    def _after_user(self) -> str:
        return self._around_user(())[1].strip()

    def _around_user(self, messages: Messages) -> tuple[str, str]:
        text = self.render([*messages, {"role": "user", "content": MARK}], answering=True)
        if text.count(MARK) != 1:
            raise DataError(f"The chat template shows a user's message {text.count(MARK)} times, expected once.")
        before, _, after = text.partition(MARK)
        return before, after

    def user_message(self, before: list[int], begun: str, ids: Sequence[int]) -> str:
        """The user's message, ``begun`` and continued with ``ids`` behind ``before``.

        As far as the first special token, or the words that the template itself puts behind it.
        """
        end = next((n for n, i in enumerate(ids) if i in self.special), len(ids))
        text = begun + self.decode([*before, *ids[:end]])[len(self.decode(before)) :]
        if self._after_user and self._after_user in text:
            text = text[: text.index(self._after_user)]
        return text.strip()

    def text(self, answer: Sequence[int]) -> str:
        """An answer as the next prompt will have it: without the token that ends it."""
        return self.tokenizer.decode(list(answer), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def answer_ids(self, prompt: list[int], text: str, ended: bool) -> list[int]:
        """Token ids of an answer that came as text, with the end token where it has ``ended``.

        Split as behind the prompt, where the tokens before stay what they were; else on its own.
        """
        whole = self.encode(self.decode(prompt) + text)
        ids = whole[len(prompt) :] if whole[: len(prompt)] == prompt else self.encode(text)
        return [*ids, self.end_id] if ended and self.end_id is not None else ids

    @cached_property
    def end_id(self) -> int | None:
        """The token that the template puts behind an answer, else the first of ``end_ids``."""
        asked = {"role": "user", "content": "."}
        after = self.render([asked, {"role": "assistant", "content": MARK}]).partition(MARK)[2]
        first = self.encode(after.lstrip())[:1]
        if first and first[0] in self.special:
            return first[0]
        return self.end_ids[0] if self.end_ids else None

    def answered(self, messages: Messages) -> list[Turn]:
        """The turns of a conversation whose answers are the target's own already.

        Raises DataError where the template shows an answer in another way than the target would have written it, for
        then a loss mask would be wrong.
        """
        turns = [
            self._answered(messages, n) for n, message in enumerate(messages) if message.get("role") == "assistant"
        ]
        if not turns:
            raise DataError("The conversation has no answer of the assistant.")
        return turns

    def _answered(self, messages: Messages, n: int) -> Turn:
        content = messages[n]["content"]
        before, whole = self.render(messages[:n], answering=True), self.render(messages[: n + 1])
        if not whole.startswith(before):
            raise DataError(
                f"Answer {n} cannot be kept: the chat template begins answers with {_end(before)}, but shows a given "
                "one without it; let the target answer again."
            )
        marked = self.render([*messages[:n], {**messages[n], "content": MARK}])
        lead, _, after = marked[len(before) :].partition(MARK)  # the lead may be an empty thinking block
        for text in (content, content.strip()):
            for front in dict.fromkeys(("", lead)):
                if text and whole == before + front + text + after:
                    turn = self._split(before + front, text, after)
                    self._read_back(turn, text, messages[: n + 1])
                    return turn
        raise DataError(
            f"Answer {n} cannot be kept: the chat template rewrites it ({_end(whole)}); let the target answer again."
        )

    def _split(self, before: str, text: str, after: str) -> Turn:
        prompt, end = self.encode(before), self.encode(after.lstrip())[:1]
        end = [i for i in end if i in self.special]
        whole = self.encode(before + text)
        ids = whole[len(prompt) :] if whole[: len(prompt)] == prompt else self.encode(text)
        return Turn(prompt, [*ids, *end])

    def _read_back(self, turn: Turn, text: str, messages: Messages) -> None:
        """The masked tokens say what was answered, and lie where the template's generation tags say, if it has any."""
        plain = self.text(self.encode(text))
        if _squeezed(self.text(turn.answer)) != _squeezed(plain):
            raise DataError(f"The tokens of an answer read {_end(self.text(turn.answer))}, expected {_end(plain)}.")
        if (tagged := self._tagged(messages)) is not None and _squeezed(plain) not in _squeezed(tagged):
            raise DataError(
                f"The chat template's generation tags mark {_end(tagged)} as the last answer, where {_end(plain)} was "
                "expected: the tags are wrong."
            )

    def _tagged(self, messages: Messages) -> str | None:
        """What the template's generation tags mark, None for a template without them."""
        template = self.tokenizer.chat_template
        texts = template.values() if isinstance(template, Mapping) else [template]
        if not any("endgeneration" in text for text in texts):
            return None
        how: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        encoded = self.tokenizer.apply_chat_template(list(messages), **how, **self.settings)
        marked = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        return self.text([i for i, mark in marked if mark])

    def render(self, messages: Messages, *, answering: bool = False) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=answering, **self.settings
            )
        except (TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
            raise DataError(f"The target's chat template cannot take these messages: {error}") from error

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def stitch(turns: Sequence[Turn]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows of ids (int32 [n]) and loss mask (bool [n]), True where the target wrote the token.

    Turns make one row as long as each prompt goes on, token for token, where the last answer ended. Some templates
    drop earlier thoughts, and some answers are split otherwise when they are read again: there a new row begins, in
    which the earlier answers are not the target's own tokens.
    """
    rows: list[tuple[list[int], list[bool]]] = []
    for turn in turns:
        if not rows or turn.prompt[: len(rows[-1][0])] != rows[-1][0]:
            rows.append(([], []))
        ids, mask = rows[-1]
        mask += [False] * (len(turn.prompt) - len(ids)) + [True] * len(turn.answer)
        ids += [*turn.prompt[len(ids) :], *turn.answer]
    return [(np.asarray(ids, np.int32), np.asarray(mask, bool)) for ids, mask in rows]


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def _end(text: str) -> str:
    return repr(text if len(text) <= 60 else f"...{text[-60:]}")
