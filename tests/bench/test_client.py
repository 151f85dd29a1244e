from __future__ import annotations

import asyncio
import time

import pytest
from bench.servers import Server, said, serving

from eyas.bench import load
from eyas.bench.client import Endpoint, _streamed, root_of
from eyas.bench.passes import Answer, BenchError, Level
from eyas.bench.workload import Prompt
from eyas.core import SamplingParams, UsageError

PROMPT = Prompt("p/1", "p", [{"role": "user", "content": "Which bird is this?"}])
PARAMS = SamplingParams(max_tokens=12, seed=0)


def ask(
    server: Server, sampling: SamplingParams = PARAMS, count: int = 1, completions: bool = False, **how
) -> list[Answer]:
    async def run() -> list[Answer]:
        endpoint = Endpoint(server.url, model="m", completions=completions)
        try:
            return [await endpoint.ask(PROMPT, sampling, **how) for _ in range(count)]
        finally:
            await endpoint.close()

    return asyncio.run(run())


def test_what_comes_and_when():
    with serving(Server(pause=0.03, burst=4)) as server:
        (answer,) = ask(server)
    assert answer.text == "".join(said("Which bird is this?", 12)) and answer.finish == "length"
    assert (answer.tokens, answer.prompt_tokens, answer.error) == (12, 4, "")
    assert len(answer.gaps) == 2 and sum(answer.gaps) > 0.045, "two steps of 30 ms"
    assert 0.025 < answer.first < answer.first + sum(answer.gaps) <= answer.total
    assert answer.per_token == pytest.approx((answer.total - answer.first) / 11)
    body = server.asked[0]
    assert body["stream_options"] == {"include_usage": True} and "seed" not in body and "ignore_eos" not in body
    assert (body["max_tokens"], body["temperature"], body["top_p"]) == (12, 0.0, 1.0)


def test_what_is_asked_for():
    with serving(Server()) as server:
        ask(server, SamplingParams(max_tokens=3, temperature=0.7, top_k=5, ignore_eos=True, seed=0), seed=9)
        (text,) = ask(server, completions=True)
    assert {"top_k": 5, "ignore_eos": True, "seed": 9, "temperature": 0.7}.items() <= server.asked[0].items()
    assert server.asked[1]["prompt"] == "Which bird is this?" and text.tokens == 12 and len(text.gaps) == 11


def test_failures_are_answers_that_say_why():
    with serving(Server(faults=[500, 429])) as server:
        wrong, busy, fine = ask(server, count=3)
    assert wrong.error == "HTTP 500: as told" and busy.error == "HTTP 429: as told" and not (wrong.lost or busy.lost)
    assert not fine.error
    with serving(Server(usage=False)) as server:
        assert "tokens cannot be counted" in ask(server)[0].error
    with serving(Server(dies_at=1)) as server:
        broken, refused = ask(server, count=2)
    assert broken.lost and refused.error


def test_a_server_that_does_not_stream():
    with serving(Server(streams=False)) as server:
        (answer,) = ask(server)
    assert answer.first is None and answer.per_token is None and answer.tokens == 12 and answer.total > 0


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([(0.1, "{nonsense")], "no event but '{nonsense'"),
        ([(0.1, '{"error": {"message": "out of memory"}}')], "in the stream: out of memory"),
        ([(0.1, '{"choices": [{"delta": {"content": "a"}}]}')], "the stream broke off"),
        ([], "the stream broke off"),
    ],
)
def test_streams_that_go_wrong(events, words):
    assert words in _streamed(PROMPT, events).error


def test_an_answer_of_nothing_but_its_end():
    stop = '{"choices": [{"delta": {}, "finish_reason": "stop"}]}'
    answer = _streamed(PROMPT, [(0.2, stop), (0.3, '{"choices": [], "usage": {"completion_tokens": 1}}')])
    assert (answer.first, answer.total, answer.tokens, answer.error, answer.text) == (0.2, 0.2, 1, "", "")


def test_thoughts_count_as_what_they_are():
    parts = [
        (0.1, '{"choices": [{"delta": {"reasoning_content": "Hm. "}}]}'),
        (0.2, '{"choices": [{"delta": {"content": "Yes"}}]}'),
    ]
    end = '{"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"completion_tokens": 4}}'
    answer = _streamed(PROMPT, [*parts, (0.3, end), (0.3, "[DONE]")])
    assert answer.text == "Hm. Yes" and answer.first == 0.1
    assert answer.total == 0.3, "the last of the 4 tokens came with the end, and has no text"


@pytest.mark.parametrize("url", ["h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/chat/completions"])
def test_addresses(url):
    assert root_of(url) == "http://h:1"


@pytest.mark.parametrize("url", ["", "ftp://h", "http://"])
def test_no_addresses(url):
    with pytest.raises(UsageError, match="An endpoint is an address"):
        root_of(url)


def test_nobody_there():
    async def run() -> None:
        await Endpoint("http://127.0.0.1:9", model="m").page("/metrics")

    with pytest.raises(BenchError, match="cannot be reached"):
        asyncio.run(run())


def test_pages_that_are_kept_from_everybody_are_not_there():
    """Only a server that will not even list its models wants another key."""

    async def run(server: Server) -> tuple[str | None, bool]:
        endpoint = Endpoint(server.url.replace("//", "//me:secret@"), model="m")
        try:
            found = await endpoint.page("/metrics"), await endpoint.forget()
            server.closed = ("/v1/models",)
            with pytest.raises(BenchError, match=rf"^http://127.0.0.1:{server.port} wants another key"):
                await endpoint.models()
            return found
        finally:
            await endpoint.close()

    with serving(Server(closed=("/metrics", "/flush_cache"))) as server:
        assert asyncio.run(run(server)) == (None, False)


def test_an_answer_of_a_server_that_forgets():
    async def run(server: Server) -> bool:
        endpoint = Endpoint(server.url, model="m")
        try:
            return await endpoint.forget()
        finally:
            await endpoint.close()

    with serving(Server(forgets="/flush_cache")) as sglang, serving(Server(forgets="/reset_prefix_cache")) as vllm:
        assert asyncio.run(run(sglang)) and asyncio.run(run(vllm))
        assert sglang.forgotten == vllm.forgotten == 1


# Load


def test_so_many_run_at_a_time_and_no_more():
    async def run(server: Server) -> load.Loaded:
        endpoint = Endpoint(server.url, model="m")
        prompts = [Prompt(f"p/{n}", "p", [{"role": "user", "content": "x" * n}]) for n in range(12)]
        try:
            return await load.put(lambda p, n: endpoint.ask(p, PARAMS), prompts, Level("concurrency", 4), seed=0)
        finally:
            await endpoint.close()

    with serving(Server(pause=0.004)) as server:
        loaded = asyncio.run(run(server))
        assert server.most_running == 4 and 2 < loaded.running <= 4 and len(server.asked) == 12
    assert [answer.key for answer in loaded.answers] == [f"p/{n}" for n in range(12)]
    assert [answer.text for answer in loaded.answers] == ["".join(said("x" * n, 12)) for n in range(12)]
    assert loaded.seconds >= max(answer.start + answer.total for answer in loaded.answers)
    starts, ends = zip(*((a.start, a.start + a.total) for a in loaded.answers), strict=True)
    assert all(sum(end <= start + 1e-4 for end in ends) >= n - 3 for n, start in enumerate(starts)), "when one is done"


def test_arrivals_are_random_alike_for_both_sides_and_wait_for_nobody():
    starts = []

    async def ask_slowly(prompt: Prompt, number: int) -> Answer:
        await asyncio.sleep(0.1)
        return Answer(prompt.key, total=0.1, tokens=1)

    prompts = [PROMPT] * 30
    for seed in (1, 1, 2):
        loaded = asyncio.run(load.put(ask_slowly, prompts, Level("request rate", 100.0), seed))
        starts.append([answer.start for answer in loaded.answers])
        assert loaded.running > 3, "some arrive while others wait"
    assert starts[0] == pytest.approx(starts[1], abs=0.05) and starts[0] != pytest.approx(starts[2], abs=0.03)
    assert 0.12 < starts[0][-1] < 0.6  # 30 at 100 a second


def test_an_error_of_ours_ends_all_requests():
    ended = []

    async def broken(prompt: Prompt, number: int) -> Answer:
        if number == 1:
            raise ZeroDivisionError
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(number)
        raise AssertionError

    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        asyncio.run(load.put(broken, [PROMPT] * 3, Level("concurrency", 3), 0))
    assert sorted(ended) == [0, 2] and time.monotonic() - begin < 10
