"""/tokenize and /detokenize."""

from __future__ import annotations

import json

import pytest
from server.live import ASKED, CHAT, CONTEXT, MODEL, chat, tokenizer
from server.test_errors import error_of


def test_tokens_of_text_and_back(live):
    reply = live.post("/tokenize", json={"model": MODEL, "prompt": "w5 w9 w77 zzz"}).json()
    unknown = tokenizer()("zzz")["input_ids"][0]
    assert reply == {"count": 4, "max_model_len": CONTEXT, "tokens": [5, 9, 77, unknown], "token_strs": None}
    named = live.post("/tokenize", json={"prompt": "w5 w9", "return_token_strs": True}).json()
    assert named["token_strs"] == ["w5", "w9"]
    assert live.post("/detokenize", json={"tokens": [5, 9, 77]}).json() == {"prompt": "w5 w9 w77"}


def test_a_chat_has_the_tokens_that_its_answer_says_it_had(live):
    as_vllm_says_it = {"messages": ASKED, "add_generation_prompt": True, "continue_final_message": False, "tools": []}
    tokens = live.post("/tokenize", json=as_vllm_says_it).json()
    answer = live.post(CHAT, json=chat(return_token_ids=True, max_tokens=1)).json()
    assert tokens["tokens"] == answer["prompt_token_ids"] and tokens["count"] == answer["usage"]["prompt_tokens"] == 5


def test_more_tokens_than_the_context_holds_can_be_counted(live):
    reply = live.post("/tokenize", json={"prompt": "w5 " * (CONTEXT + 7)})
    assert reply.status_code == 200 and reply.json()["count"] == CONTEXT + 7


@pytest.mark.parametrize(
    "path, body, param, words",
    [
        ("/tokenize", {}, "prompt", "either"),
        ("/tokenize", {"prompt": "w5", "messages": ASKED}, "prompt", "either"),
        ("/tokenize", {"prompt": 5}, "prompt", "string"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt", "unicode"),
        ("/tokenize", {"prompt": "w5" * 10_000}, "prompt", "characters"),
        ("/tokenize", {"messages": []}, "messages", ""),
        ("/tokenize", {"prompt": "w5", "add_bos": True}, "add_bos", "Unknown"),
        ("/tokenize", {"messages": ASKED, "tools": [{"type": "function"}]}, "tools", "not supported"),
        ("/tokenize", {"messages": ASKED, "add_generation_prompt": False}, "add_generation_prompt", "not supported"),
        ("/tokenize", {"prompt": "w5", "model": "gpt-4"}, "model", MODEL),
        ("/detokenize", {}, "tokens", "required"),
        ("/detokenize", {"tokens": [160]}, "tokens", "0 to 159"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "0 to 159"),
        ("/detokenize", {"tokens": ["w5"]}, "tokens[0]", "integer"),
        ("/detokenize", {"tokens": [5] * (CONTEXT + 1)}, "tokens", f"{CONTEXT}"),
        ("/detokenize", {"tokens": [5], "zzz": 1}, "zzz", "Unknown"),
    ],
    ids=str,
)
def test_tokens_that_make_no_sense(live, path, body, param, words):
    reply = live.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    error = error_of(reply, 404 if body.get("model") else 400)
    assert error["param"] == param and words in error["message"], error
