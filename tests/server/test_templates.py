"""chat_template_kwargs: what reaches the target's chat template, and what never does."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from cli import tiny
from PIL import Image
from server.live import ASKED, CHAT, chat, model
from server.test_errors import error_of
from server.test_faults import serving

from eyas.engine.llm import LLM
from eyas.target.images import encode_chat, variables

LOUD = tiny.TEMPLATE + "{% if thinking %} w9 w10{% elif steps is defined %} {{ 'w7 ' * (8 // steps) }}{% endif %}"


@pytest.fixture(scope="module")
def loud():
    """Its template has two settings."""

    def load() -> LLM:
        made = model()
        made.tokenizer.chat_template = LOUD
        return made

    with serving(load) as server:
        yield server


@pytest.mark.parametrize(
    "settings, behind", [({}, []), ({"thinking": True}, [9, 10]), ({"thinking": False, "steps": 4}, [7, 7])], ids=str
)
def test_the_template_hears_its_settings(loud, settings, behind):
    plain = loud.post("/tokenize", json={"messages": ASKED}).json()["tokens"]
    asked = chat(chat_template_kwargs=settings, return_token_ids=True, max_tokens=1)
    answer = loud.post(CHAT, json=asked).json()
    assert answer["prompt_token_ids"] == plain + behind
    tokens = loud.post("/tokenize", json={"messages": ASKED, "chat_template_kwargs": settings}).json()["tokens"]
    assert tokens == plain + behind


def test_what_a_template_does_not_read_changes_nothing(live):
    asked = chat(chat_template_kwargs={"enable_thinking": False, "size": {"height": 9}})
    assert live.post(CHAT, json=asked).json()["choices"] == live.post(CHAT, json=chat()).json()["choices"]


@pytest.mark.parametrize(
    "settings, param, words",
    [
        ({"tools": []}, "chat_template_kwargs.tools", "not a setting"),
        ({"messages": []}, "chat_template_kwargs.messages", "not a setting"),
        ({"chat_template": "{{ 1 }}"}, "chat_template_kwargs.chat_template", "not a setting"),
        ({"add_generation_prompt": False}, "chat_template_kwargs.add_generation_prompt", "not a setting"),
        ({"tokenize": False}, "chat_template_kwargs.tokenize", "not a setting"),
        ({"eos_token": "x"}, "chat_template_kwargs.eos_token", "not a setting"),
        ({"thinking": "x" * 5000}, "chat_template_kwargs", "4,096"),
        ({"thinking": [[[[[[[[[[1]]]]]]]]]]}, "chat_template_kwargs", "deep"),
        ("thinking", "chat_template_kwargs", "dictionary"),
        ({"steps": 0}, "messages", "chat template"),
        ({"steps": "many"}, "messages", "chat template"),
        ({"steps": {}}, "messages", "chat template"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_settings_that_make_no_sense(loud, settings, param, words):
    error = error_of(loud.post(CHAT, json=chat(chat_template_kwargs=settings)))
    assert error["param"] == param and words in error["message"], error


def test_a_processor_is_given_nothing_but_what_its_template_reads():
    """It would take the rest for its own arguments: sizes of images, for one."""
    heard = {}

    class Processor:
        chat_template: ClassVar[Any] = {
            "default": "{% generation %}{% set size = 3 %}{{ size }}{{ depth }}{% endgeneration %}"
        }

        def apply_chat_template(self, messages, **settings):
            heard.update(settings)
            return {"input_ids": torch.tensor([[5, 9]])}

    shown = [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (2, 2))}]}]
    settings = {"size": {"height": 10_000}, "depth": 2, "do_resize": False}
    assert encode_chat(shown, None, Processor(), chat_template_kwargs=settings)[0] == [5, 9]
    assert {*heard} == {"depth", "tokenize", "add_generation_prompt", "return_dict", "return_tensors"}
    assert heard["depth"] == 2
    assert variables("{% for m in messages %}{{ m }}{% break %}{% endfor %}{{ on }}") == {"messages", "on"}
