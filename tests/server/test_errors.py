"""Whatever is wrong with a request: OpenAI's error object, one sentence, and the field it is about."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError
from server.live import CHAT, COMPLETIONS, CONTEXT, MODEL, Live, chat, completion, model, wait_for

from eyas.server.protocol import HARMLESS, UNSUPPORTED, ChatRequest, CompletionRequest

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_of(reply: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json" and reply.headers["x-request-id"]
    body = reply.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error = body["error"]
    assert error["type"] == TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    message = error["message"]
    assert 10 < len(message) < 400 and message[-1] in ".?" and "Traceback" not in message and "pydantic" not in message
    return error


def long_text(words: int) -> str:
    return " ".join(["w5"] * words)


CHATS = [
    ({"messages": []}, "messages", ""),
    ({"messages": "hello"}, "messages", "list"),
    ({"messages": None}, "messages", "required"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'assistant'"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string or input should be a valid list"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]", "object"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0]", "image_url"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "unicode"),
    ({"messages": [{"role": "assistant", "content": "w5", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls", ""),
    ({"messages": [{"role": "user", "content": long_text(CONTEXT)}]}, "messages", f"the context holds {CONTEXT}"),
    ({"messages": [{"role": "user", "content": "w5" * 10_000}]}, "messages", "characters"),
    ({"messages": [{"role": "user", "content": "w5", "prefix": True}]}, "messages[0].prefix", "not supported"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "w5", "min_pixels": 5}]}]},
        "messages[0].content[0].min_pixels",
        "not supported",
    ),
    ({"stream_options": {"usage": True}, "stream": True}, "stream_options.usage", "not supported"),
    ({"model": "gpt-4"}, "model", MODEL),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 129}, "n", "128"),
    ({"temperature": -1}, "temperature", "0"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_k": -2}, "top_k", "-1"),
    ({"max_tokens": 0}, "max_tokens", "1"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "1"),
    ({"min_tokens": 50}, "min_tokens", "max_tokens"),
    ({"presence_penalty": 3}, "presence_penalty", "2"),
    ({"stop": ["a"] * 65}, "stop", "64"),
    ({"stop": ""}, "stop", "1 character"),
    ({"stop": [1, 2]}, "stop[0]", "string"),
    ({"seed": 1 << 70}, "seed", ""),
    ({"logit_bias": {"a": 1}}, "logit_bias", "integer"),
    ({"logit_bias": {"999": 1}}, "logit_bias", "vocabulary"),
    ({"logit_bias": {"9": 101}}, "logit_bias", "100"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options", "stream"),
    ({"response_format": {"type": "json_object"}}, "response_format", "tokenizer"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema", "required"),
    ({"speculation": "fixed"}, "speculation", "'off'"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"tool_choice": "required"}, "tool_choice", "not supported"),
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
    ({"audio": {"voice": "x"}}, "audio", "not supported"),
    ({"best_of": 2}, "best_of", "not supported"),
    ({"temprature": 1}, "temprature", "temperature"),
    ({"zzz": 1}, "zzz", "openapi"),
]
COMPLETED = [
    ({"prompt": None}, "prompt", "required"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": [1, "a"]}, "prompt", "token ids"),
    ({"prompt": {"a": 1}}, "prompt", "token ids"),
    ({"prompt": [160]}, None, "outside the target's 0 to 159"),
    ({"prompt": [-1]}, None, "outside"),
    ({"prompt": [5] * CONTEXT}, "prompt", "context"),
    ({"prompt": ["w5"] * 300}, None, "260"),
    ({"echo": True}, "echo", "not supported"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"logprobs": 21}, "logprobs", "20"),
    ({"prompt": list("abc") * 100_000}, "prompt", "token ids"),
]


@pytest.mark.parametrize("more, param, words", CHATS, ids=[str(case[0])[:50] for case in CHATS])
def test_chat(live, more, param, words):
    content = json.dumps({**chat(stream=len(words) % 2 == 1), **more}, ensure_ascii=True)
    error = error_of(
        live.post(CHAT, content=content, headers={"Content-Type": "application/json"}), 404 if param == "model" else 400
    )
    assert error["param"] == param and words in error["message"], error


@pytest.mark.parametrize("more, param, words", COMPLETED, ids=[str(case[0])[:50] for case in COMPLETED])
def test_completions(live, more, param, words):
    error = error_of(live.post(COMPLETIONS, json={**completion(), **more}))
    assert error["param"] == param and words in error["message"], error


@pytest.mark.parametrize(
    "more",
    [
        {"logit_bias": {f"k{n}": 1 for n in range(50_000)}},
        {"messages": [5] * 50_000},
        {"messages": [{"role": "user", "content": [5] * 50_000}]},
    ],
    ids=["logit_bias", "messages", "content"],
)
def test_many_mistakes_are_few_errors(more):
    """A loop that has to list them all answers nobody else."""
    with pytest.raises(ValidationError) as found:
        ChatRequest.model_validate(chat(**more))
    assert found.value.error_count() <= 3


def test_a_name_without_end_is_looked_at_for_a_moment_only(live, monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr("eyas.server.protocol.difflib.get_close_matches", lambda name, *rest: seen.append(name) or [])
    assert error_of(live.post(CHAT, json=chat(**{"z" * 100_000: 1})))["param"] == "z" * 64 == seen[0]


def test_no_field_is_both_known_and_not():
    ours = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
    assert not ours & set(UNSUPPORTED) and not ours & HARMLESS and not HARMLESS & set(UNSUPPORTED)


def test_every_unsupported_field_is_refused_and_taken_where_it_means_nothing(live):
    for name, neutral in UNSUPPORTED.items():
        assert error_of(live.post(CHAT, json=chat(**{name: {"really": 1}})))["param"] == name
        for value in (*neutral, None):
            assert live.post(CHAT, json=chat(**{name: value}, max_tokens=1)).status_code == 200


# Not even a request


@pytest.mark.parametrize("content", [b"", b"{", b"{}x", b"[" * 50_000, b'{"seed":' + b"1" * 5000 + b"}", b"\xff\xfe{}"])
def test_what_is_no_json(live, content):
    error_of(live.post(CHAT, content=content, headers={"Content-Type": "application/json"}))


@pytest.mark.parametrize("content", [b"[]", b"5", b"null", b'"x"'])
def test_json_that_is_no_object(live, content):
    error = error_of(live.post(CHAT, content=content, headers={"Content-Type": "application/json"}))
    assert "object" in error["message"]


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None]
)
def test_other_content_types(live, kind):
    reply = live.post(CHAT, content=b"{}", headers={"Content-Type": kind} if kind else {})
    assert "application/json" in error_of(reply, 415)["message"]


def test_wrong_addresses_and_methods(live):
    assert error_of(live.get("/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(live.post("/v1/nothing", json={}), 404)
    assert error_of(live.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert error_of(live.get("/docs"), 404) and error_of(live.get("/redoc"), 404)
    reply = live.get(CHAT)
    assert error_of(reply, 405) and reply.headers["allow"] == "POST"
    with live.http() as client:
        assert error_of(client.request("BREW", "/health"), 405)
        assert client.head(CHAT).status_code == 405
        assert error_of(client.options(CHAT, headers={"Origin": "http://evil.example"}), 405)


def test_no_page_elsewhere_may_read_answers(live):
    reply = live.post(CHAT, json=chat(max_tokens=1), headers={"Origin": "http://evil.example"})
    assert reply.status_code == 200 and not [name for name in reply.headers if name.startswith("access-control")]


# Sizes


@pytest.fixture(scope="module")
def small():
    server = Live(max_body_bytes=2000, body_timeout=0.5)
    yield server
    server.close()


def test_a_body_that_is_too_large(small):
    big = chat(messages=[{"role": "user", "content": "x" * 3000}])
    assert error_of(small.post(CHAT, json=big), 413)["code"] == "body_too_large"
    chunks = (b"x" * 500 for _ in range(10))  # no Content-Length
    reply = small.post(CHAT, content=chunks, headers={"Content-Type": "application/json"})
    assert error_of(reply, 413) and reply.headers["connection"] == "close"
    assert small.post(CHAT, json=chat(max_tokens=1)).status_code == 200


def raw(server: Live, *pieces: bytes, pause: float = 0.0) -> bytes:
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause)
        received = b""
        while data := connection.recv(65536):
            received += data
        return received


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "item, count, status", [(5, 450, 200), (5, 510, 413), ([], 80, 200), ([], 130, 413), ({"a": 5}, 60, 413)], ids=str
)
def test_a_body_of_too_many_values(live, monkeypatch, item, count, status):
    """Reading them would keep others waiting: they are counted before."""
    monkeypatch.setattr("eyas.server.gate.MOST_VALUES", 500)
    reply = live.post(COMPLETIONS, json=completion(metadata=[item] * count, max_tokens=1))
    assert reply.status_code == status
    if status == 413:
        error = error_of(reply, 413)
        assert error["code"] == "body_too_large" and "500 are taken" in error["message"]


def test_a_chunked_body_without_end_is_not_read_to_its_end(small):
    chunk = b"3e8\r\n" + b"x" * 1000 + b"\r\n"
    received = raw(small, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 5)
    assert received.startswith(b"HTTP/1.1 413 ") and b"body_too_large" in received


def test_a_client_that_asks_first_sends_nothing(small):
    received = raw(small, HEAD + b"Expect: 100-continue\r\nContent-Length: 999999\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 413 ")


def test_a_body_that_does_not_come(small):
    received = raw(small, HEAD + b"Content-Length: 100\r\n\r\n{")
    assert received.startswith(b"HTTP/1.1 408 ") and b'"timeout"' in received


# Who may ask


KEY = "s\u00e9cret\u00e0"  # the last byte of which is a blank to those who take bytes for characters


@pytest.fixture(scope="module")
def keyed():
    server = Live(api_key=KEY)
    yield server
    server.close()


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": KEY},
        {"Authorization": "Basic x"},
        {"X-API-Key": "n"},
    ],
    ids=str,
)
def test_without_the_key_nothing_is_told(keyed, headers):
    raw_headers = {name: value.encode() for name, value in headers.items()}
    for path in ("/v1/models", "/metrics", "/server_info", "/openapi.json", "/nothing"):
        reply = keyed.get(path, headers=raw_headers)
        assert error_of(reply, 401)["code"] == "invalid_api_key" and reply.headers["www-authenticate"] == "Bearer"
    assert error_of(keyed.post(CHAT, json=chat(), headers=raw_headers), 401)


def test_with_the_key(keyed):
    for headers in ({"Authorization": f"Bearer {KEY}".encode()}, {"X-API-Key": KEY.encode()}):
        assert keyed.get("/v1/models", headers=headers).status_code == 200
        assert keyed.post(CHAT, json=chat(max_tokens=1), headers=headers).status_code == 200
    assert keyed.get("/health").status_code == 200
    assert "cret" not in keyed.get("/server_info", headers=headers).text + repr(keyed.settings)
    with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
        keyed.openai(api_key="wrong").models.list()


@pytest.mark.parametrize("path", [CHAT, "/health"])
def test_who_has_no_key_takes_nobodys_place(path):
    server = Live(lambda: model(max_running_requests=1), api_key="k", max_queued_requests=0)
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        for _ in range(6):  # their bodies do not come: a refusal lingers for them
            stack.enter_context(socket.create_connection((host, int(port)), timeout=20)).sendall(head)
        reply = server.post(CHAT, json=chat(max_tokens=1), headers={"X-API-Key": "k"})
        assert reply.status_code == 200
        wait_for(lambda: server.service.open_requests == 0)
    server.close()


def test_a_name_that_points_here_from_elsewhere(live, keyed):
    """DNS rebinding: without a key, a page in a browser on this machine could read answers."""
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example"):
        assert error_of(live.get("/v1/models", headers={"Host": host}), 403)["code"] == "host_not_allowed"
    for host in ("localhost", "LOCALHOST:5000", "[::1]:30000", "127.0.0.1"):
        assert live.get("/v1/models", headers={"Host": host}).status_code == 200
    assert keyed.get("/health", headers={"Host": "evil.example"}).status_code == 200


# What is written down


def test_the_log_has_ids_and_figures_and_nothing_that_a_user_wrote(live, caplog):
    caplog.set_level(logging.DEBUG, "eyas.server")
    secret = "w5 w9 w123"
    reply = live.post(
        CHAT, json=chat(messages=[{"role": "user", "content": secret}]), headers={"X-Request-ID": "mine-1"}
    )
    assert reply.headers["x-request-id"] == "mine-1"
    live.post(CHAT, json=chat(**{"w123": secret}, model="w123"))
    live.post(CHAT, json=chat(messages=[{"role": "user", "content": 123.125}]))
    live.get(f"/v1/models/w123?x={secret}")
    live.get("/w123")
    strange = live.get("/v1/models", headers={"X-Request-ID": "a b\tc w123"}).headers["x-request-id"]
    assert len(strange) == 32
    wait_for(lambda: len(caplog.records) >= 6)  # a line is written behind its answer
    lines = [record.getMessage() for record in caplog.records if record.name == "eyas.server"]
    assert len(lines) == 6
    assert lines[0].startswith("request id=mine-1 method=POST endpoint=/v1/chat/completions status=200 seconds=")
    assert (
        " prompt_tokens=5 " in lines[0] and " completion_tokens=12 " in lines[0] and "first_token_seconds=" in lines[0]
    )
    assert "status=404" in lines[1] and "error=model_not_found" in lines[1]
    assert "endpoint=/v1/models/{name:path} status=404" in lines[3] and "endpoint=- status=404" in lines[4]
    assert not [line for line in lines if "w123" in line or "123.125" in line]
