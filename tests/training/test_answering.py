from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence

import pytest
from training import talkers

from eyas.core import SamplingParams, UsageError
from eyas.training import answering
from eyas.training.answering import Answer, EndpointAnswerer, Prompt, Refused, base_url
from eyas.training.conversation import Chat
from eyas.training.dataset import DataError

TOKENIZER = talkers.tokenizer()
CHAT = Chat(TOKENIZER, (TOKENIZER.eos_token_id,))
PARAMS = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=200, seed=5, stop_token_ids=(1,))


def prompt(number: int = 0) -> Prompt:
    messages = [{"role": "user", "content": f"Question {number}?"}]
    return Prompt(CHAT.prompt(messages), messages)


def expected(asked: Prompt) -> Answer:
    said = talkers.utterance(CHAT.decode(asked.ids))
    return Answer([*CHAT.encode(said), TOKENIZER.eos_token_id], True)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str | None]]:
    """Pauses are noted instead of made."""
    pauses: list[tuple[int, str | None]] = []
    monkeypatch.setattr(answering, "_pause", lambda attempt, asked: pauses.append((attempt, asked)) or 0.0)
    return pauses


def ask(server_url: str, prompts: Sequence[Prompt], params: SamplingParams = PARAMS, **how: object) -> list[Answer]:
    async def run() -> list[Answer]:
        who = EndpointAnswerer(server_url, CHAT, **how)
        try:
            return await asyncio.gather(*(who.complete(p, params) for p in prompts))
        finally:
            await who.close()

    return asyncio.run(run())


def test_token_ids_both_ways() -> None:
    with talkers.serving(TOKENIZER) as server:
        assert ask(server.url, [prompt()]) == [expected(prompt())]
        request = server.asked[-1]
    assert request["prompt"] == prompt().ids and request["return_token_ids"]
    assert request["repetition_detection"] == answering.ENOUGH
    assert {key: request[key] for key in ("temperature", "top_p", "max_tokens", "stop_token_ids", "model", "path")} == {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 200,
        "stop_token_ids": [1],
        "model": "m",
        "path": "/v1/completions",
    }


def test_a_server_that_cannot_stop_at_loops_is_not_asked_to() -> None:
    with talkers.serving(TOKENIZER, strict=True) as server:
        assert ask(server.url, [prompt()]) == [expected(prompt())]
        request = server.asked[-1]
    assert request["return_token_ids"] and "repetition_detection" not in request


@pytest.mark.parametrize("how", [{"ids": False}, {"ids": False, "takes_ids": False}])
def test_a_server_that_speaks_text(how: dict[str, bool]) -> None:
    with talkers.serving(TOKENIZER, **how) as server:
        assert ask(server.url, [prompt(), prompt(1)]) == [expected(prompt()), expected(prompt(1))]


def test_a_server_with_chat_only() -> None:
    with talkers.serving(TOKENIZER, completions=False) as server:
        (answer,) = ask(server.url, [prompt()])
        said = talkers.utterance(str(prompt().messages))
        assert answer == Answer([*CHAT.encode(said), TOKENIZER.eos_token_id], True)
        assert server.asked[-1]["messages"] == prompt().messages
        with pytest.raises(DataError, match="give it some with --prompts"):
            ask(server.url, [Prompt(prompt().ids)])


@pytest.mark.parametrize("ids", [True, False])
def test_an_answer_that_is_cut_off_has_no_end(ids: bool) -> None:
    with talkers.serving(TOKENIZER, ids=ids) as server:
        (answer,) = ask(server.url, [prompt()], SamplingParams(max_tokens=6))
    assert answer == Answer(expected(prompt()).ids[:6], False)


def test_many_at_once_and_none_mixed_up() -> None:
    prompts = [prompt(n) for n in range(100)]
    with talkers.serving(TOKENIZER) as server:
        server.delay = 0.05
        assert ask(server.url, prompts, concurrency=16) == [expected(p) for p in prompts]
        assert 4 <= server.most_running <= 16


def test_a_busy_server_is_asked_again(no_waiting: list) -> None:
    with talkers.serving(TOKENIZER) as server:
        busy = json.dumps({"error": {"message": "try later"}})
        server.faults = [(503, busy, {}), (429, busy, {"Retry-After": "7"}), (500, "oops", {})]
        assert ask(server.url, [prompt()]) == [expected(prompt())]
    assert no_waiting == [(0, None), (1, "7"), (2, None)]


def test_patience_ends() -> None:
    with talkers.serving(TOKENIZER) as server:
        server.faults = [(503, "overloaded", {})] * 3
        with pytest.raises(DataError, match=r"answers 503: overloaded, 3 times\. What was made is kept"):
            ask(server.url, [prompt()], retries=2)
    with pytest.raises(DataError, match=r"cannot be reached .*, 2 times"):
        ask(server.url, [prompt()], retries=1, model="m")  # closed


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ((401, '{"error": {"message": "bad key"}}', {}), r"wants another key \(bad key\): set OPENAI_API_KEY"),
        ((200, "<html>Welcome</html>", {}), "does not speak OpenAI's protocol: it sent '<html>"),
        ((200, '{"choices": []}', {}), "sent no completion"),
        ((200, '{"detail": 1}', {}), "sent no completion"),
    ],
)
def test_servers_that_are_something_else(fault: tuple, words: str) -> None:
    with talkers.serving(TOKENIZER) as server:
        server.faults = [fault]
        with pytest.raises(DataError, match=words):
            ask(server.url, [prompt()], model="m")


def test_another_tokenizer_is_noticed() -> None:
    other = talkers.tokenizer()
    other.add_tokens(["ri"])
    with (
        talkers.serving(other) as server,
        pytest.raises(DataError, match="another tokenizer"),
    ):
        server.repeats = "river river"
        ask(server.url, [prompt()])


def test_which_model() -> None:
    with talkers.serving(TOKENIZER) as server:
        server.models = ["a", "b"]
        with pytest.raises(UsageError, match=r"serves 2 models \(a, b\): say which with --model"):
            ask(server.url, [prompt()])
        assert ask(server.url, [prompt()], model="b") == [expected(prompt())]
        assert server.asked[-1]["model"] == "b"


def test_one_refused_prompt_is_no_end() -> None:
    async def run(url: str) -> tuple[BaseException | Answer, ...]:
        who = EndpointAnswerer(url, CHAT)
        first = await who.complete(prompt(), PARAMS)
        server.faults = [(400, '{"message": "too long"}', {})]
        try:
            await who.complete(prompt(1), PARAMS)
        except Refused as error:
            refused = error
        last = await who.complete(prompt(2), PARAMS)
        await who.close()
        return first, refused, last

    with talkers.serving(TOKENIZER) as server:
        first, refused, last = asyncio.run(run(server.url))
    assert (first, last) == (expected(prompt()), expected(prompt(2)))
    assert "400: too long" in str(refused)


def test_nothing_there_at_all() -> None:
    with talkers.serving(TOKENIZER) as server:
        server.faults = [(404, '{"error": "no such model"}', {})] * 4
        with pytest.raises(DataError, match=r"neither completions nor chat completions: .*no such model"):
            ask(server.url, [prompt()], model="x")


def test_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with talkers.serving(TOKENIZER) as server:
        ask(server.url, [prompt()])
        assert server.asked[-1]["key"] == "Bearer secret"


def test_pauses_grow_and_end(monkeypatch: pytest.MonkeyPatch, no_waiting: list) -> None:
    monkeypatch.undo()
    pause: Callable[[int, str | None], float] = answering._pause
    for attempt, asked, middle in ((0, None, 0.5), (3, None, 4.0), (12, None, 60.0), (0, "9", 9.0), (0, "900", 60.0)):
        assert 0.75 * middle <= pause(attempt, asked) <= 1.25 * middle
    assert 0.3 <= pause(0, "Wed, 21 Oct 2015 07:28:00 GMT") <= 0.7


def test_what_a_server_takes_long_for_is_waited_for() -> None:
    with talkers.serving(TOKENIZER) as server:
        server.delay, begin = 0.3, time.monotonic()
        assert ask(server.url, [prompt()]) == [expected(prompt())]
        assert time.monotonic() - begin >= 0.3


@pytest.mark.parametrize(
    "url",
    ["http://h:1", "http://h:1/", "http://h:1/v1", "h:1", "http://h:1/v1/chat/completions", "http://h:1/v1/models"],
)
def test_addresses(url: str) -> None:
    assert base_url(url) == "http://h:1/v1"


@pytest.mark.parametrize("url", ["", "ftp://h", "http://"])
def test_no_addresses(url: str) -> None:
    with pytest.raises(UsageError, match="--endpoint is an address"):
        base_url(url)
