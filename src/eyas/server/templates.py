"""``chat_template_kwargs``: what a request may tell its target's chat template."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from eyas.server.errors import refused

FIELD = "chat_template_kwargs"
LONGEST = 4096  # characters, as JSON
DEEPEST = 8


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
