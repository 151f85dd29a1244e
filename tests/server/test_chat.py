"""/v1/chat/completions through the official client, against what the target says by itself."""

from __future__ import annotations

import base64
import io
import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from cli import tiny
from PIL import Image
from server.live import ASKED, CHAT, COMPLETIONS, MODEL, Live, chat, completion, model, plainly, tokenizer, wait_for

from eyas.core import SamplingParams
from eyas.engine.llm import load
from eyas.server.errors import ApiError
from eyas.server.images import ImageReader

SEED = 3


def expected(messages: Any = ASKED, **sampling: Any) -> str:
    return plainly(messages, SamplingParams(**{"temperature": 1.0, "max_tokens": 12, "seed": SEED, **sampling})).text


def text_of(stream: Any) -> str:
    return "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)


# What is said


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"presence_penalty": 1.5, "frequency_penalty": -1.0},
        {"logit_bias": {"33": 5.0, "12": -100}},
        {"max_completion_tokens": 5, "max_tokens": 12},
        {"extra_body": {"top_k": 4, "min_p": 0.05, "repetition_penalty": 1.4}},
        {"extra_body": {"stop_token_ids": [12], "min_tokens": 6}},
    ],
    ids=str,
)
def test_the_text_is_the_targets_own(live, settings):
    answer = live.openai().chat.completions.create(**{**chat(), **settings})
    flat = {**settings, **settings.get("extra_body", {})}
    flat.pop("extra_body", None)
    limit = flat.pop("max_completion_tokens", None)
    if "logit_bias" in flat:
        flat["logit_bias"] = {int(key): value for key, value in flat["logit_bias"].items()}
    alone = plainly(
        ASKED,
        SamplingParams(
            **{"temperature": 1.0, "max_tokens": 12, "seed": SEED, **flat} | ({"max_tokens": limit} if limit else {})
        ),
    )
    (choice,) = answer.choices
    assert choice.message.content == alone.text and choice.message.role == "assistant"
    assert choice.finish_reason == alone.finish_reason
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == MODEL
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, len(alone.tokens))
    assert answer.usage.total_tokens == 5 + len(alone.tokens)


def test_usage_says_what_speculation_brought(live):
    body = live.post(CHAT, json=chat(max_tokens=40)).json()
    seen = body["usage"]["speculative"]
    assert set(seen) == {"steps", "drafted", "accepted", "acceptance_length"}
    assert 0 < seen["steps"] <= 39 and seen["drafted"] > seen["steps"]
    emitted = seen["acceptance_length"] * seen["steps"]
    assert emitted == pytest.approx(seen["accepted"] + seen["steps"], abs=1)  # a last draft may be cut at its end
    off = live.post(CHAT, json=chat(max_tokens=40, speculation="off")).json()
    assert off["usage"]["speculative"] == {"steps": 0, "drafted": 0, "accepted": 0, "acceptance_length": 1.0}
    assert off["choices"] == body["choices"]


def test_a_long_answer_fills_the_context(live):
    body = live.post(CHAT, json={"messages": ASKED, "seed": 1}).json()
    assert body["usage"]["total_tokens"] == 256 and body["choices"][0]["finish_reason"] == "length"


def test_messages_of_all_kinds(live):
    parts = [{"type": "text", "text": "w5 w9"}, {"type": "text", "text": "w77"}]
    given = [
        {"role": "developer", "content": "w8"},
        {"role": "user", "content": parts, "name": "somebody"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [], "annotations": []},
        {"role": "user", "content": "w6"},
    ]
    plain = [
        {"role": "system", "content": "w8"},
        {"role": "user", "content": "w5 w9\nw77"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "w6"},
    ]
    answer = live.openai().chat.completions.create(**chat(messages=given))
    assert answer.choices[0].message.content == expected(plain)


def test_nulls_and_harmless_fields_change_nothing(live):
    nothing = ("n", "stop", "logprobs", "top_p", "temperature", "tools", "logit_bias", "stream", "response_format")
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "tools": [],
                "tool_choice": "auto", "parallel_tool_calls": True, "best_of": 1, "modalities": ["text"],
                "top_logprobs": 0}  # fmt: skip
    for more in (dict.fromkeys(nothing), harmless, {"response_format": {"type": "text"}}):
        body = live.post(CHAT, json=chat(**more)).json()
        assert body["choices"][0]["message"]["content"] == expected()


# Streams


def test_a_stream_is_the_same_text_in_pieces(live):
    chunks = list(live.openai().chat.completions.create(**chat(max_tokens=40), stream=True))
    assert text_of(chunks) == expected(max_tokens=40)
    assert chunks[0].choices[0].delta.role == "assistant" and len(chunks) > 10
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({c.id for c in chunks}) == 1 and all(c.object == "chat.completion.chunk" for c in chunks)
    assert all(c.usage is None for c in chunks)


def test_the_stream_as_it_goes_over_the_wire(live):
    options = {"include_usage": True, "continuous_usage_stats": True}
    with live.http() as client, client.stream("POST", CHAT, json=chat(stream=True, stream_options=options)) as reply:
        lines = list(reply.iter_lines())
    assert (
        reply.headers["content-type"].startswith("text/event-stream") and reply.headers["cache-control"] == "no-cache"
    )
    assert all(
        line.startswith("data: ") == (n % 2 == 0) and (line == "") == (n % 2 == 1) for n, line in enumerate(lines)
    )
    assert lines[-2] == "data: [DONE]"
    events = [json.loads(line[6:]) for line in lines[:-2:2]]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 12 and all(e["usage"]["prompt_tokens"] == 5 for e in events)
    assert events[-1]["choices"] == [] and events[-1]["usage"]["speculative"]["steps"] > 0


def test_usage_comes_last_where_it_is_asked_for(live):
    stream = live.openai().chat.completions.create(**chat(), stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    assert chunks[-1].usage.speculative["steps"] > 0


def test_several_choices(live):
    """Each is what its own seed says; in a stream all come at once, each under its index."""
    texts = [expected(seed=SEED + n) for n in range(3)]
    assert len(set(texts)) == 3
    answer = live.openai().chat.completions.create(**chat(n=3))
    assert [(c.index, c.message.content) for c in answer.choices] == list(enumerate(texts))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 36)
    streamed, order = [""] * 3, []
    for chunk in live.openai().chat.completions.create(**chat(n=3), stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            order.append(choice.index)
    assert streamed == texts and order != sorted(order)


# Where it ends


@pytest.mark.parametrize(
    "stop",
    [["98 w1"], ["w118 w1", "51 w12"], ["never"], [*map(str, range(990, 1053)), "51 w12"], ["w118 w1", "w118"]],
    ids=lambda stop: str(stop)[:24],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_stop_strings_across_tokens(live, stop, streamed):
    whole = expected()
    ends = {one: whole.index(one) for one in stop if one in whole}
    create = live.openai().chat.completions.create
    if streamed:
        chunks = list(create(**chat(stop=stop), stream=True))
        text, last = text_of(chunks), chunks[-1].choices[0]
        assert {chunk.choices[0].stop_reason for chunk in chunks[:-1]} == {None}
    else:
        answer = create(**chat(stop=stop))
        last = answer.choices[0]
        text = last.message.content
    assert text == (whole[: min(ends.values())] if ends else whole)
    assert last.finish_reason == ("stop" if ends else "length") and bool(ends) == (stop != ["never"])
    first = sorted(ends, key=lambda one: (ends[one], len(one)))  # of two that begin together the shorter one is there
    assert last.stop_reason == (first[0] if ends else None)


def test_the_end_token_ends_it_unless_ignored(live):
    forced = {"logit_bias": {str(tiny.SPECIAL["<end>"]): 100}}
    body = live.post(CHAT, json=chat(**forced)).json()
    assert body["choices"][0]["message"]["content"] == "" and body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] is None and body["usage"]["completion_tokens"] == 1
    body = live.post(CHAT, json=chat(**forced, ignore_eos=True)).json()
    assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("path, asked", [(CHAT, chat), (COMPLETIONS, completion)], ids=["chat", "completion"])
def test_the_stop_token_that_ended_it_is_told(live, path, asked):
    end = tiny.SPECIAL["<end>"]
    for given, ids, reason in (({}, [33, 12], 12), ({}, [end], None), ({"ignore_eos": True}, [end, 12], end)):
        forced = {"stop_token_ids": ids, "stop": ["w7"], "logit_bias": {str(12 if reason == 12 else end): 100}, **given}
        (choice,) = live.post(path, json=asked(**forced)).json()["choices"]
        assert choice["finish_reason"] == "stop" and choice["stop_reason"] == reason
    (choice,) = live.post(path, json=asked()).json()["choices"]
    assert choice["finish_reason"] == "length" and choice["stop_reason"] is None


def test_of_several_end_tokens_only_the_tokenizers_own_goes_without_saying(live, monkeypatch):
    """As in vLLM, where the others of a generation config count among the stop tokens."""
    end = tiny.SPECIAL["<end>"]
    monkeypatch.setattr(live.engine.llm.engine, "eos_ids", (end, 12))
    for token, reason in ((end, None), (12, 12)):
        (choice,) = live.post(CHAT, json=chat(logit_bias={str(token): 100}, min_tokens=3)).json()["choices"]
        assert choice["finish_reason"] == "stop" and choice["stop_reason"] == reason


# What else is told


def test_log_probabilities_are_the_targets(live):
    answer = live.openai().chat.completions.create(**chat(), logprobs=True, top_logprobs=3)
    alone = plainly(ASKED, SamplingParams(temperature=1.0, max_tokens=12, seed=SEED))
    ids = [0, 5, 9, 77, 1, *alone.token_ids]
    with torch.no_grad():
        logp = zoo.case("llama").model(torch.tensor([ids])).logits[0].log_softmax(-1)
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == alone.text.split()
    for place, (entry, token) in enumerate(zip(content, alone.token_ids, strict=True), start=4):
        assert entry.logprob == pytest.approx(logp[place, token].item(), abs=1e-4)
        assert bytes(entry.bytes).decode() == entry.token
        best = logp[place].topk(3)
        assert [top.token for top in entry.top_logprobs] == [tokenizer().decode([i]) for i in best.indices.tolist()]
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
    only = live.openai().chat.completions.create(**chat(), logprobs=True).choices[0].logprobs.content
    assert [entry.logprob for entry in only] == [entry.logprob for entry in content]
    assert all(entry.top_logprobs == [] for entry in only)
    chunks = live.openai().chat.completions.create(**chat(), logprobs=True, stream=True)
    told = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert [entry.logprob for entry in told] == [entry.logprob for entry in only]


def test_token_ids(live):
    alone = plainly(ASKED, SamplingParams(temperature=1.0, max_tokens=12, seed=SEED))
    body = live.post(CHAT, json=chat(return_token_ids=True)).json()
    assert body["prompt_token_ids"] == [0, 5, 9, 77, 1] and body["choices"][0]["token_ids"] == alone.token_ids
    stream = live.post(CHAT, json=chat(return_token_ids=True, stream=True)).text.split("\n\n")
    events = [json.loads(line[6:]) for line in stream[:-2]]
    assert [i for event in events for i in event["choices"][0].get("token_ids", [])] == alone.token_ids
    assert [event.get("prompt_token_ids") for event in events] == [[0, 5, 9, 77, 1]] + [None] * (len(events) - 1)


# The same text, however it is decoded


def test_the_same_seed_says_the_same_everywhere(live):
    """With speculation fixed, auto, and off; alone, and among others."""
    texts = {number: expected(seed=number, max_tokens=20) for number in range(12)}
    auto, off = Live(lambda: model(speculation="auto")), Live(lambda: model(drafter=None, shape=None))

    def ask(server: Live, number: int, **more: Any) -> str:
        body = server.post(CHAT, json=chat(seed=number, max_tokens=20, **more)).json()
        return body["choices"][0]["message"]["content"]

    try:
        for server in (live, auto, off):
            assert ask(server, 1) == ask(server, 1, speculation="off") == texts[1]
            with ThreadPoolExecutor(12) as together:
                how = [{} if number % 3 else {"speculation": "off"} for number in texts]
                answers = list(together.map(lambda pair, s=server: ask(s, pair[0], **pair[1]), enumerate(how)))
            assert answers == list(texts.values())
    finally:
        auto.close()
        off.close()


def test_sampling_that_is_left_open_is_the_targets(live):
    """The generation config's, as in vLLM and SGLang, unless the server is told to take OpenAI's."""

    def recommended() -> Any:
        made = model()
        made.target.model.generation_config.temperature = 0.5
        made.target.model.generation_config.top_k = 3
        return made

    for defaults, sampling in ((True, {"temperature": 0.5, "top_k": 3}), (False, {"temperature": 1.0})):
        server = Live(recommended, model_defaults=defaults)
        body = server.post(CHAT, json=chat()).json()
        assert body["choices"][0]["message"]["content"] == expected(**sampling)
        body = server.post(CHAT, json=chat(temperature=0)).json()
        assert body["choices"][0]["message"]["content"] == expected(**{**sampling, "temperature": 0})
        server.close()


# Images


def picture(colour: str = "red", size: tuple[int, int] = (9, 7)) -> str:
    content = io.BytesIO()
    Image.new("RGB", size, colour).save(content, "PNG")
    return data_url(content.getvalue())


def turned_by_nonsense() -> str:
    """A fine picture whose orientation is cut off."""
    content = io.BytesIO()
    Image.new("RGB", (9, 7)).save(content, "PNG", exif=b"Exif\0\0II*\0")
    return data_url(content.getvalue())


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def shown(url: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "w5 w9"}]
    return [{"role": "system", "content": "w8"}, {"role": "user", "content": parts}]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    folder = tiny.save_seeing(Path(tmp_path_factory.mktemp("seeing")))
    server = Live(lambda: load(folder, context_length=128))
    yield server
    server.close()


def test_an_image_is_seen(seeing):
    url = picture()
    file = io.BytesIO(base64.b64decode(url.partition(",")[2]))
    opened = Image.open(file).convert("RGB")
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "w8"}]},
        {"role": "user", "content": [{"type": "image", "image": opened}, {"type": "text", "text": "w5 w9"}]},
    ]
    alone = load(seeing.service.llm.name, context_length=128).generate(messages, max_tokens=8, temperature=0.0)
    for given in (url, {"url": url}, {"url": url, "detail": "low"}):
        body = seeing.post(CHAT, json=chat(messages=shown(given), temperature=0, max_tokens=8)).json()
        assert body["choices"][0]["message"]["content"] == alone.text
        assert body["usage"]["prompt_tokens"] == alone.prompt_tokens
    other = seeing.post(CHAT, json=chat(messages=shown(picture("blue")), temperature=0, max_tokens=8)).json()
    assert other["choices"][0]["message"]["content"] != alone.text


def huge(side: int) -> str:
    """A few bytes that say they are so many pixels high and wide."""
    head = bytearray(base64.b64decode(picture().partition(",")[2]))
    head[16:24] = side.to_bytes(4, "big") * 2
    head[29:33] = zlib.crc32(head[12:29]).to_bytes(4, "big")
    return data_url(bytes(head))


@pytest.mark.parametrize(
    "url, words",
    [
        ("http://127.0.0.1:1/a.png", "data URL"),
        ("file:///etc/passwd", "data URL"),
        ("/etc/passwd", "data URL"),
        ("data:image/png;base64,!!!", "base64"),
        ("data:image/png,abc", "base64"),
        ("data:image/png;base64," + base64.b64encode(b"no image").decode(), "cannot be read|can be read"),
        (huge(60_000), "too large"),
        (huge(8_000), "8000 x 8000 pixels, more than 50,000,000"),
        (picture()[:-40], "damaged|base64"),
        (turned_by_nonsense(), "damaged"),
    ],
)
def test_what_is_no_image_is_refused(seeing, url, words):
    reply = seeing.post(CHAT, json=chat(messages=shown({"url": url})))
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == "messages[1].content[0]"
    assert any(word in error["message"] for word in words.split("|")), error


def test_images_share_one_allowance(monkeypatch):
    monkeypatch.setattr("eyas.server.images.MAX_PIXELS", 100)
    reader = ImageReader()
    assert reader.read(picture(), "here").size == (9, 7)
    with pytest.raises(ApiError, match="9 x 7 pixels"):
        reader.read(picture(), "here")
    assert reader.read(picture(size=(37, 1)), "here").size == (37, 1)


def test_images_that_wait_have_a_bound(seeing):
    service = seeing.service
    wait_for(lambda: service.in_flight == service.image_bytes == 0)
    service.image_bytes = service.settings.max_image_bytes
    try:
        reply = seeing.post(CHAT, json=chat(messages=shown(picture()), max_tokens=1))
        assert reply.status_code == 429 and reply.json()["error"]["code"] == "queue_full"
        assert seeing.post(CHAT, json=chat(max_tokens=1)).status_code == 200
    finally:
        service.image_bytes -= service.settings.max_image_bytes
    assert seeing.post(CHAT, json=chat(messages=shown(picture()), max_tokens=1)).status_code == 200
    wait_for(lambda: service.image_bytes == 0)


def test_images_are_counted(seeing):
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": picture()}}] * 17}]
    reply = seeing.post(CHAT, json=chat(messages=messages))
    assert reply.status_code == 400 and "16 images" in reply.json()["error"]["message"]


def test_a_target_that_sees_nothing_says_so(live):
    reply = live.post(CHAT, json=chat(messages=shown({"url": picture()})))
    assert reply.status_code == 400 and "no image processor" in reply.json()["error"]["message"]
