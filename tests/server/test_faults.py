"""Callers that leave, servers that are full, not ready yet or told to end, and what breaks in between."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from cli import tiny
from server.live import ASKED, CHAT, COMPLETIONS, PATIENCE, Live, chat, completion, model, plainly, wait_for
from server.test_errors import error_of

from eyas.core import EyasError, SamplingParams, TargetError
from eyas.engine.llm import LLM

LONG = 200


def slow(**settings: Any) -> LLM:
    """A step takes a while: nothing that is waited for here is over by itself before it should be."""
    made = model(**settings)
    step = made.engine.step

    def stepping(hear: Any) -> Any:
        time.sleep(0.02)
        return step(hear)

    made.engine.step = stepping  # type: ignore[method-assign]
    return made


@contextlib.contextmanager
def serving(load: Callable[[], LLM] = slow, **settings: Any) -> Iterator[Live]:
    server = Live(load, **settings)
    try:
        yield server
    finally:
        server.close()


def finished(server: Live) -> float:
    """Answers that came to their end."""
    return sum(
        s.value for family in server.service.metrics._finished.collect() for s in family.samples if "total" in s.name
    )


@contextlib.contextmanager
def streaming(server: Live, **more: Any) -> Iterator[Iterator[str]]:
    """The lines of an answer of which the first piece is there."""
    asked = chat(**{"max_tokens": LONG, "stream": True, **more})
    with server.http() as client, client.stream("POST", CHAT, json=asked) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: {") and reply.status_code == 200
        yield lines


# Callers that leave


@pytest.mark.parametrize("n", [1, 3])
def test_who_leaves_a_stream_frees_its_places_at_once(n):
    with serving() as server:
        with streaming(server, n=n):
            assert server.state()[0] == n == server.state()[2]
        wait_for(lambda: server.state() == (0, 0, 0))
        assert finished(server) == 0
        wait_for(lambda: server.service.open_requests == 0)


@pytest.mark.parametrize("path, asked", [(CHAT, chat), (COMPLETIONS, completion)], ids=["chat", "completion"])
def test_who_leaves_while_all_is_made_at_once(path, asked):
    with serving() as server:
        with pytest.raises(httpx.ReadTimeout), server.http() as client:
            client.post(path, json=asked(max_tokens=LONG), timeout=httpx.Timeout(PATIENCE, read=0.5))
        wait_for(lambda: server.state() == (0, 0, 0))
        assert finished(server) == 0


def test_who_waits_can_leave_too():
    with serving(lambda: slow(max_running_requests=1)) as server, streaming(server, max_tokens=80) as lines:
        with pytest.raises(httpx.ReadTimeout), server.http() as client:
            client.post(CHAT, json=chat(max_tokens=LONG, stream=True), timeout=httpx.Timeout(PATIENCE, read=0.2))
        wait_for(lambda: server.state()[1:] == (0, 1))
        assert finished(server) == 0
        assert list(lines)[-2] == "data: [DONE]"
        wait_for(lambda: server.state() == (0, 0, 0))
        assert finished(server) == 1


def test_crowds_that_come_and_leave(live):
    """Nothing is mixed up, lost or left behind."""
    texts = {n: plainly(ASKED, SamplingParams(temperature=1.0, max_tokens=15, seed=n)).text for n in range(40)}

    def ask(number: int) -> str | None:
        rest = random.Random(number)
        with live.http() as client:
            if number % 2:
                return client.post(CHAT, json=chat(seed=number, max_tokens=15)).json()["choices"][0]["message"][
                    "content"
                ]
            with client.stream("POST", CHAT, json=chat(seed=number, max_tokens=15, stream=True)) as reply:
                for _ in zip(reply.iter_lines(), range(rest.randrange(1, 12)), strict=False):
                    pass
        return None

    with ThreadPoolExecutor(16) as crowd:
        for number, text in enumerate(crowd.map(ask, texts)):
            assert text is None or text == texts[number]
    wait_for(lambda: live.state() == (0, 0, 0))


# Too many


def test_a_full_server_says_so_at_once():
    with serving(lambda: slow(max_running_requests=1), max_queued_requests=1) as server:
        with streaming(server, max_tokens=100), ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.post, CHAT, json=chat())
            wait_for(lambda: server.state() == (1, 1, 2))
            for path, asked in ((CHAT, chat()), (CHAT, chat(stream=True)), (COMPLETIONS, completion())):
                reply = server.post(path, json=asked)
                assert error_of(reply, 429)["code"] == "queue_full" and int(reply.headers["retry-after"]) >= 1
            with pytest.raises(openai.RateLimitError, match="running or waiting"):
                server.openai().chat.completions.create(**chat())
            assert server.get("/health").status_code == 200
            assert waiting.result().status_code == 200
        assert server.openai(max_retries=2).chat.completions.create(**chat()).usage.completion_tokens == 12
        error = error_of(server.post(CHAT, json=chat(n=3)))
        assert "3 answers" in error["message"]


def test_many_answers_need_no_more_than_one_place():
    """All but one are taken for longer than the answers need: who had to wait for three would get nothing."""
    with serving(lambda: slow(max_running_requests=3), max_queued_requests=0) as server:
        with streaming(server), streaming(server), ThreadPoolExecutor(1) as pool:
            many = pool.submit(server.post, CHAT, json=chat(n=3, max_tokens=20))
            wait_for(lambda: server.state() == (3, 0, 5))  # two wait where the engine does not see them
            error = error_of(server.post(CHAT, json=chat(max_tokens=1)), 429)  # and nobody gets in before them
            assert "5 answers are running or waiting, and no more are taken from 3 on" in error["message"]
            choices = many.result().json()["choices"]
            assert server.state() == (2, 0, 2)
        for n, choice in enumerate(choices):
            alone = plainly(ASKED, SamplingParams(temperature=1.0, max_tokens=20, seed=3 + n))
            assert choice["message"]["content"] == alone.text


def test_nobody_is_outrun_for_ever_by_those_who_ask_for_less():
    tries, served = {1: 0, 4: 0}, threading.Event()

    def ask(server: Live, n: int) -> None:
        with server.http() as client:
            while not served.is_set():
                tries[n] += 1
                if client.post(CHAT, json=chat(n=n, max_tokens=2)).status_code == 200 and n == 4:
                    served.set()

    with serving(lambda: slow(max_running_requests=2), max_queued_requests=2) as server, ThreadPoolExecutor(7) as crowd:
        small = [crowd.submit(ask, server, 1) for _ in range(6)]
        wait_for(lambda: tries[1] > 20)
        large = crowd.submit(ask, server, 4)
        if not served.wait(PATIENCE):
            served.set()
            pytest.fail(f"refused {tries[4]} times")
        for future in (large, *small):
            future.result()


def test_who_leaves_takes_along_what_had_no_place_yet():
    with serving(lambda: slow(max_running_requests=2), max_queued_requests=1) as server, streaming(server):
        with streaming(server, n=3):
            assert server.state() == (2, 1, 4)
        wait_for(lambda: server.state() == (1, 0, 1))
        assert server.post(CHAT, json=chat(n=3, max_tokens=2)).status_code == 200


# Who does not read


def tagged(server: Live, status: str) -> float:
    found = server.service.metrics.registry.get_sample_value(
        "eyas:http_requests_total", {"endpoint": CHAT, "status": status}
    )
    return found or 0.0


@contextlib.contextmanager
def asking_for_much(server: Live) -> Iterator[socket.socket]:
    """A stream of a megabyte, and two systems that keep little of it."""
    body = json.dumps(chat(n=4, max_tokens=LONG, stream=True, logprobs=True, top_logprobs=20)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.socket() as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        caller.settimeout(PATIENCE)
        caller.connect((host, int(port)))
        caller.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: server.service.open_requests == 1)
        yield caller


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no such limit")
def test_who_never_reads_a_stream_has_left(monkeypatch):
    monkeypatch.setattr("eyas.server.lifecycle.UNREAD", 0.5)
    server = Live()
    with asking_for_much(server):
        wait_for(lambda: server.service.open_requests == 0)
        wait_for(lambda: tagged(server, "499") == 1)
    assert server.state() == (0, 0, 0) and not server.service._inboxes and tagged(server, "200") == 0
    assert server.post(CHAT, json=chat()).status_code == 200
    server.close()


def test_who_reads_slowly_has_not_left(monkeypatch):
    monkeypatch.setattr("eyas.server.lifecycle.UNREAD", 2.0)
    server = Live()
    with asking_for_much(server) as caller:
        received = bytearray()
        for _ in range(3):
            time.sleep(0.8)
            while len(part := caller.recv(4096)) == 4096:
                received += part
            received += part
        while part := caller.recv(1 << 16):
            received += part
    assert b"data: [DONE]" in received[-40:] and len(received) > 500_000
    wait_for(lambda: tagged(server, "200") == 1)
    server.close()


def test_requests_that_are_not_answers_yet_have_a_bound_too(live):
    service = live.service
    wait_for(lambda: service.open_requests == 0)
    service.open_requests += 2 * service.places
    try:
        error = error_of(live.post(CHAT, json=chat()), 429)
        assert error["code"] == "queue_full" and "being read or answered" in error["message"]
        assert live.get("/health").status_code == 200
    finally:
        service.open_requests -= 2 * service.places
    assert live.post(CHAT, json=chat(max_tokens=1)).status_code == 200


# Not yet


def test_the_port_is_open_while_the_target_loads():
    go_on = threading.Event()

    def load() -> LLM:
        assert go_on.wait(PATIENCE)
        return model()

    server = Live(load, ready=False)
    for reply in (server.get("/health"), server.get("/v1/models"), server.post(CHAT, json=chat())):
        assert error_of(reply, 503)["code"] == "loading" and int(reply.headers["retry-after"]) >= 1
    assert server.get("/metrics").status_code == 200 and server.get("/openapi.json").status_code == 200
    go_on.set()
    wait_for(lambda: server.service.status == "ready")
    assert server.openai().chat.completions.create(**chat()).usage.completion_tokens == 12
    assert server.get("/health").json() == {"status": "ready"}
    server.close()


def test_a_target_that_cannot_be_loaded_ends_the_server():
    def load() -> LLM:
        raise TargetError("there is no such target")

    server = Live(load)
    server.ended()
    assert isinstance(server.failure, TargetError)
    with pytest.raises(httpx.ConnectError):
        server.get("/health")


def test_told_to_end_while_the_target_loads():
    forever = threading.Event()
    server = Live(lambda: forever.wait() and model(), ready=False)  # type: ignore[arg-type, return-value]
    assert server.get("/health").status_code == 503
    server.tell_to_end()
    server.ended()
    assert server.finished is False and server.failure is None
    forever.set()


def test_an_address_that_is_taken(live):
    from eyas.server.lifecycle import listening

    port = int(live.url.rpartition(":")[2])
    with pytest.raises(EyasError, match=f"cannot listen on 127.0.0.1:{port}.*--port"):
        listening("127.0.0.1", port)


# The end


def test_what_was_begun_is_answered_before_the_end():
    alone = plainly(ASKED, SamplingParams(temperature=1.0, max_tokens=40, seed=3))
    server = Live(lambda: slow(max_running_requests=1), drain_timeout=PATIENCE)
    with ThreadPoolExecutor(1) as pool, streaming(server, max_tokens=40, seed=3) as lines:
        waiting = pool.submit(server.post, CHAT, json=chat(max_tokens=40))
        wait_for(lambda: server.state()[1] == 1)
        server.tell_to_end()
        wait_for(lambda: server.service.status == "draining")
        for refused in (server.get("/health"), server.post(CHAT, json=chat()), server.get("/v1/models")):
            assert error_of(refused, 503)["code"] == "draining" and refused.headers["retry-after"]
        pieces = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert pieces[-1]["choices"][0]["finish_reason"] == alone.finish_reason
        assert waiting.result().json()["choices"][0]["message"]["content"] == alone.text
    server.ended()
    assert server.finished and server.failure is None and not server.engine._thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        server.get("/health")


@pytest.mark.parametrize("how", ["timeout", "told twice"])
def test_who_takes_too_long_is_told(how):
    server = Live(slow, drain_timeout=0.3 if how == "timeout" else 3600)
    with ThreadPoolExecutor(1) as pool, streaming(server) as stream:
        whole: Future[httpx.Response] = pool.submit(server.post, CHAT, json=chat(max_tokens=LONG))
        wait_for(lambda: server.state()[0] == 2)
        server.tell_to_end()
        if how == "told twice":
            server.tell_to_end()
        lines = [line for line in stream if line]
        assert json.loads(lines[-2][6:])["error"]["code"] == "draining" and lines[-1] == "data: [DONE]"
        assert error_of(whole.result(), 503)["code"] == "draining"
    server.ended()
    assert server.finished and server.failure is None


def held_back(server: Live) -> threading.Event:
    """Prompts are read when it is set."""
    go_on, read = threading.Event(), server.service.encoder.chat

    def waiting(asked: Any) -> Any:
        assert go_on.wait(PATIENCE)
        return read(asked)

    server.service.encoder.chat = waiting  # type: ignore[method-assign]
    return go_on


def test_who_was_let_in_is_answered_though_the_prompt_is_still_read():
    server = Live(drain_timeout=PATIENCE)
    go_on = held_back(server)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.post, CHAT, json=chat())
        wait_for(lambda: server.service.open_requests == 1)
        server.tell_to_end()
        wait_for(lambda: server.service.status == "draining")
        go_on.set()
        assert reply.result().status_code == 200
    server.ended()
    assert server.finished


def test_who_still_waits_for_the_tokenizer_at_the_end_is_told():
    server = Live(drain_timeout=0.1)
    go_on = held_back(server)
    with ThreadPoolExecutor(2) as pool:
        replies = [pool.submit(server.post, CHAT, json=chat()) for _ in range(2)]
        wait_for(lambda: server.service.open_requests == 2)
        server.tell_to_end()
        wait_for(lambda: server.service.ended)
        go_on.set()
        for reply in replies:
            assert error_of(reply.result(), 503)["code"] == "draining"
    server.ended()
    assert server.finished


@pytest.mark.parametrize("signals, drain_timeout", [(1, 0.3), (2, 3600)], ids=["timeout", "told twice"])
def test_a_step_without_end_ends_all_the_same(monkeypatch, signals, drain_timeout):
    monkeypatch.setattr("eyas.server.lifecycle.FLUSH", 0.5)
    go_on, inside = threading.Event(), threading.Event()

    def stuck() -> LLM:
        made = model()
        step = made.engine.step

        def stepping(hear: Any) -> Any:
            inside.set()
            assert go_on.wait(PATIENCE)
            return step(hear)

        made.engine.step = stepping  # type: ignore[method-assign]
        return made

    server = Live(stuck, drain_timeout=drain_timeout)
    with ThreadPoolExecutor(2) as pool:
        replies = [pool.submit(server.post, CHAT, json=chat(stream=stream)) for stream in (False, True)]
        assert inside.wait(PATIENCE)
        wait_for(lambda: server.service.in_flight == 2)
        for _ in range(signals):
            server.tell_to_end()
        for reply in replies:  # though the engine says nothing any more
            assert error_of(reply.result(), 503)["code"] == "draining"
        server.ended()
        assert server.status == 1 and server.failure is None
        go_on.set()


# What breaks


def faults(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for record in caplog.records if (text := record.getMessage()).startswith("fault ")]


def test_a_target_that_breaks_on_a_prompt(caplog):
    def load() -> LLM:
        return LLM(tiny.poisoned(), tiny.tokenizer(), context_length=128)

    with serving(load) as server:
        poison = chat(messages=[{"role": "user", "content": "w40"}])
        for asked in (poison, {**poison, "stream": True}):
            assert error_of(server.post(CHAT, json=asked), 500)["code"] == "non_finite_logits"
        assert len(faults(caplog)) == 2 and all("error=NonFiniteLogitsError" in line for line in faults(caplog))
        assert server.post(CHAT, json=chat()).status_code == 200
        with pytest.raises(openai.InternalServerError):
            server.openai().chat.completions.create(**poison)


def test_an_engine_that_fails_in_the_middle(caplog):
    with serving() as server:
        engine = server.engine.llm.engine
        step, due = engine.step, threading.Event()

        def failing(hear: Any) -> Any:
            if due.is_set():
                due.clear()
                raise RuntimeError("the roof falls in")
            return step(hear)

        engine.step = failing
        client = server.openai()
        stream = iter(client.chat.completions.create(**chat(max_tokens=LONG), stream=True))
        next(stream)
        due.set()
        with pytest.raises(openai.APIError, match="The engine failed at this request"):
            list(stream)
        (fault,) = faults(caplog)
        assert "caused by RuntimeError" in fault and "in failing" in fault
        (engines,) = [r.getMessage() for r in caplog.records if r.name == "eyas.engine"]
        assert "RuntimeError" in engines and "in failing" in engines
        assert not [
            r for r in caplog.records if "the roof falls in" in r.getMessage().replace('("the roof falls in")', "")
        ]
        wait_for(lambda: server.state() == (0, 0, 0))
        assert client.chat.completions.create(**chat()).usage.completion_tokens == 12


@pytest.mark.parametrize("streamed", [False, True])
def test_a_mistake_of_the_servers_own_is_logged_and_not_told(live, monkeypatch, caplog, streamed):
    def mistaken(*args: Any) -> Any:
        raise ZeroDivisionError("w5 w9 w77")

    caplog.set_level(logging.INFO, "eyas.server")
    with monkeypatch.context() as patch:
        patch.setattr(live.service.encoder, "chat", mistaken)
        error = error_of(live.post(CHAT, json=chat(stream=streamed)), 500)
        assert error["code"] == "internal_error" and "w77" not in error["message"]
    wait_for(lambda: bool(faults(caplog)))
    (fault,) = faults(caplog)
    assert "ZeroDivisionError" in fault and "in mistaken" in fault and "w77" not in fault.replace('"w5 w9 w77"', "")
    assert live.post(CHAT, json=chat()).status_code == 200


def test_an_engine_that_is_gone():
    server = Live()
    server.engine.close()
    for reply in (server.get("/health"), server.post(CHAT, json=chat())):
        assert error_of(reply, 503)["code"] == "engine_stopped"
    assert server.get("/metrics").status_code == 200
    server.close()
