"""Constrained answers over HTTP: OpenAI's response_format, vLLM's structured_outputs, SGLang's fields."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import jsonschema
import pytest
import zoo
from engine.harness import TREE, random_drafter
from letters import tokenizer
from pydantic import BaseModel, Field
from schemas import schemas
from server.live import CHAT, COMPLETIONS, MODEL, NAME, Live, wait_for

from eyas.core import SamplingParams, StructuredOutputsParams
from eyas.engine import grammar
from eyas.engine.llm import LLM
from eyas.target.adapter import HFTarget

ASKED = [{"role": "user", "content": "what?"}]
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}


def writer(**settings: Any) -> LLM:
    """A tiny target that spells."""
    target = HFTarget(zoo.case(NAME).build())
    defaults = {"drafter": random_drafter(NAME), "shape": TREE, "speculation": "fixed", "max_running_requests": 8}
    return LLM(target, tokenizer(), context_length=256, **{**defaults, **settings})


@pytest.fixture(scope="module")
def spelling() -> Iterator[Live]:
    server = Live(writer)
    yield server
    assert server.state() == (0, 0, 0)
    server.close()


def answer(server: Live, path: str = CHAT, **fields: Any) -> Any:
    where = {"messages": ASKED} if path == CHAT else {"prompt": "what?"}
    return server.post(path, json={"model": MODEL, "max_tokens": 150, "seed": 5, **where, **fields})


def text_of(reply: Any) -> str:
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"] if "message" in choice else choice["text"]


def test_the_openai_client_gets_what_its_schema_says(spelling):
    client = spelling.openai()
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    for seed in range(3):
        asked: Any = {"model": MODEL, "messages": ASKED, "response_format": form, "seed": seed, "max_tokens": 150}
        whole = client.chat.completions.create(**asked)
        jsonschema.validate(json.loads(whole.choices[0].message.content), CITY)
        assert whole.choices[0].finish_reason == "stop" and whole.usage.speculative["steps"] > 0
        plain = client.chat.completions.create(**asked, extra_body={"speculation": "off"})
        assert plain.choices[0].message.content == whole.choices[0].message.content
        stream = client.chat.completions.create(**asked, stream=True)
        parts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        assert "".join(parts) == whole.choices[0].message.content and len(parts) > 3


class Answer(BaseModel):
    kind: Literal["red", "blue"]
    parts: list[Annotated[int, Field(ge=0, le=50)]] = Field(min_length=1, max_length=2)
    note: Annotated[str, Field(max_length=4)] | None


def test_the_openai_client_parses_its_own_classes(spelling):
    """``parse`` writes the schema of a pydantic class, in OpenAI's strict form."""
    client = spelling.openai()
    parsed = client.chat.completions.parse(model=MODEL, messages=ASKED, response_format=Answer, seed=1, max_tokens=200)
    found = parsed.choices[0].message.parsed
    assert isinstance(found, Answer) and found.kind in ("red", "blue") and 1 <= len(found.parts) <= 2


FORMS: dict[str, dict[str, Any]] = {
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}},
    "structured_outputs, an object": {"structured_outputs": {"json": CITY}},
    "structured_outputs, text": {"structured_outputs": {"json": json.dumps(CITY)}},
    "json_schema": {"json_schema": json.dumps(CITY)},
}
PATTERN = "[a-c]{3,6}-[0-9]{2}"
GBNF = 'root ::= [a-c] [a-c] [a-c] "-" [0-9] [0-9]'


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_way_to_say_it(spelling, path):
    texts = {name: text_of(answer(spelling, path, **fields)) for name, fields in FORMS.items()}
    assert len(set(texts.values())) == 1, texts
    jsonschema.validate(json.loads(texts["json_schema"]), CITY)
    assert text_of(answer(spelling, path, regex=PATTERN)) == text_of(
        answer(spelling, path, structured_outputs={"regex": PATTERN})
    )
    for fields in ({"ebnf": GBNF}, {"structured_outputs": {"grammar": GBNF}}, {"regex": PATTERN}):
        assert re.fullmatch(PATTERN, text_of(answer(spelling, path, **fields)))
    choices = ["yes", "no", "perhaps"]
    assert text_of(answer(spelling, path, structured_outputs={"choice": choices})) in choices
    short = {str(tokenizer()(letter)["input_ids"][0]): 20 for letter in '"}'}
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        made = answer(spelling, path, **fields, logit_bias=short)
        assert isinstance(json.loads(text_of(made)), dict)
    assert answer(spelling, path, response_format={"type": "text"}, max_tokens=5).status_code == 200


def test_many_at_once_each_with_its_own(spelling):
    """Different constraints, and none, in one batch: each says what it says alone."""
    made = schemas(8, seed=3)
    fields = [{"structured_outputs": {"json": schema}} if n % 3 else {} for n, schema in enumerate(made)]
    replies: dict[int, Any] = {}

    def ask(n: int) -> None:
        with spelling.http() as client:
            body = {"model": MODEL, "prompt": "what?", "max_tokens": 60, "seed": n, "n": 2, **fields[n]}
            replies[n] = client.post(COMPLETIONS, json=body).json()

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    llm = writer(drafter=None, speculation="off")
    for n, schema in enumerate(made):
        outputs = StructuredOutputsParams(json=schema) if n % 3 else None
        for choice in replies[n]["choices"]:
            sampling = SamplingParams(
                temperature=1.0, seed=n + choice["index"], max_tokens=60, structured_outputs=outputs
            )
            alone = llm.generate("what?", sampling)
            assert choice["text"] == alone.text and choice["finish_reason"] == alone.finish_reason
            if n % 3 and choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["text"]), schema)


def test_an_answer_may_be_cut_short(spelling):
    reply = answer(spelling, regex="[a-z]{50}", max_tokens=9).json()
    assert reply["choices"][0]["finish_reason"] == "length" and reply["usage"]["completion_tokens"] == 9


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "two": ({"regex": "a", "ebnf": GBNF}, "ebnf", "regex and ebnf cannot both be given"),
    "two, of different engines": (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "cannot both be given",
    ),
    "two in one": ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one of"),
    "none in one": ({"structured_outputs": {}}, "structured_outputs", "must have one of json, json_object"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
    "half a schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        "is required",
    ),
    "unknown type": ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
    "structural tag": (
        {"structured_outputs": {"structural_tag": "{}"}},
        "structured_outputs.structural_tag",
        "not supp",
    ),
    "no regex": ({"regex": "(a"}, "regex", "The regex cannot be used"),
    "no JSON": ({"json_schema": "{"}, "json_schema", "The JSON schema cannot be used"),
    "not supported": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"uniqueItems": True}}}},
        "response_format",
        "uniqueItems",
    ),
    "no choices": ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1 item"),
    "half a character": ({"regex": "\ud800"}, "regex", "The regex cannot be used"),
    "old names": ({"guided_json": CITY}, "guided_json", "not supported"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_is_a_400_that_names_the_field(spelling, what):
    fields, param, message = WRONG[what]
    body = json.dumps({"model": MODEL, "prompt": "what?", **fields})
    reply = spelling.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == param and message in error["message"], error


def test_compiling_keeps_nobody_waiting(spelling, monkeypatch):
    """Constraints that take their time: others do not wait for them, even if they are constrained as somebody was."""
    assert answer(spelling, regex="known[ab]{3}").status_code == 200
    slow, go = threading.Event(), threading.Event()
    original = grammar.source_of

    def waits(asked: StructuredOutputsParams) -> str:
        slow.set()
        assert go.wait(30)
        return original(asked)

    monkeypatch.setattr(grammar, "source_of", waits)
    replies: list[Any] = []
    patterns = [f"slow{n}[ab]{{3}}" for n in range(40)]  # more than asyncio has threads
    asking = [threading.Thread(target=lambda p=p: replies.append(answer(spelling, regex=p))) for p in patterns]
    for thread in asking:
        thread.start()
    assert slow.wait(30)
    wait_for(lambda: spelling.service.open_requests == len(patterns))
    with spelling.http() as client:
        body = {"model": MODEL, "prompt": "what?", "max_tokens": 4}
        assert client.post(COMPLETIONS, json=body).status_code == 200
        assert client.post(COMPLETIONS, json={**body, "regex": "known[ab]{3}"}).status_code == 200
        assert client.get("/health").status_code == 200
    assert not replies
    go.set()
    for thread in asking:
        thread.join(30)
    assert len(replies) == len(patterns) and all(text_of(reply).startswith("slow") for reply in replies)


@pytest.mark.parametrize(
    "stop, text, reason",
    [
        ([], "hello", None),
        (["zz", "hellos"], "hello", None),
        ("o", "hell", "o"),
        (["lo", "l"], "he", "l"),  # it is there a token earlier
        (["lo", "ello", "ell!"], "h", "ello"),  # both with the same token
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_only_a_stop_string_is_a_reason_to_stop(spelling, path, stop, text, reason):
    """Where the grammar lets nothing follow an answer just ends."""
    for streamed in (False, True):
        reply = answer(spelling, path, regex="hello", stop=stop, stream=streamed)
        if not streamed:
            assert text_of(reply) == text and reply.json()["choices"][0]["stop_reason"] == reason
        else:
            events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
            assert [event["choices"][0]["stop_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
            assert events[-1]["choices"][0]["stop_reason"] == reason


def test_a_target_without_bytes_says_so(live):
    reply = live.post(COMPLETIONS, json={"model": MODEL, "prompt": "w5", "response_format": {"type": "json_object"}})
    assert reply.status_code == 400 and "This target's tokenizer cannot be used" in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == "response_format"
