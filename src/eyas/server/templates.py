"""``chat_template_kwargs``: what a request may tell its target's chat template."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import Environment
from jinja2.meta import find_undeclared_variables

from eyas.server.errors import refused

FIELD = "chat_template_kwargs"
LONGEST = 4096  # characters, as JSON
DEEPEST = 8
GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")  # a tag that transformers adds to Jinja
MISTAKES = (ArithmeticError, AttributeError)  # of a template with values it was not made for


@dataclass(frozen=True)
class Templated:
    """A tokenizer or processor whose chat template hears more than the messages."""

    inner: Any
    settings: Mapping[str, Any]

    @property
    def chat_template(self) -> Any:
        return getattr(self.inner, "chat_template", None)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> Any:
        """Raises what the inner one raises, and ValueError for values that break the template."""
        # what a template does not read would be taken for an argument of the processor's
        read = variables(template_of(self.inner))
        heard = {name: value for name, value in self.settings.items() if name in read}
        try:
            return self.inner.apply_chat_template(messages, **heard, **how)
        except MISTAKES as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


def check_settings(settings: Mapping[str, Any], tokenizer: Any) -> None:
    """Raises ApiError for settings that are too large, or would replace what is not the caller's to say."""
    if not shallow(settings) or len(json.dumps(settings)) > LONGEST:
        raise refused(FIELD, f"{FIELD} may have {LONGEST:,} characters as JSON, {DEEPEST} levels deep.")
    ours = {"messages", "conversations", *inspect.signature(tokenizer.apply_chat_template).parameters}
    for name in settings:
        if name in ours or name.endswith("_token"):
            name = name[:64]
            raise refused(f"{FIELD}.{name}", f"{FIELD}: {name} is not a setting of the template: leave it out.")


def shallow(value: Any, levels: int = DEEPEST) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels >= 0 and all(shallow(item, levels - 1) for item in inside)


def template_of(speaker: Any) -> str:
    """The template that a tokenizer or processor uses unless told otherwise; empty where there is none."""
    found = getattr(speaker, "chat_template", None)
    return (found.get("default") if isinstance(found, Mapping) else found) or ""


@lru_cache(maxsize=8)
def variables(template: str) -> frozenset[str]:
    """What a template reads and does not set itself. Raises jinja2's TemplateError where it is none."""
    parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION.sub("", template))
    return frozenset(find_undeclared_variables(parsed))
