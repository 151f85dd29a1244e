"""/health_generate, /model_info and what SGLang's clients read of /server_info."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from cli import tiny
from server.live import CHAT, MODEL, PATIENCE, Live, chat, model, wait_for
from server.test_errors import error_of
from server.test_faults import serving, slow, streaming

from eyas.engine.llm import LLM

HEALTH = "/health_generate"


def test_an_idle_engine_is_asked_for_one_token(live, monkeypatch):
    asked: list[Any] = []
    engine = live.engine.llm.engine
    add = engine.add
    monkeypatch.setattr(engine, "add", lambda request: asked.append(request) or add(request))
    assert live.get(HEALTH).json() == {"status": "ready"}
    assert [request.sampling.max_tokens for request in asked] == [1]
    wait_for(lambda: live.state() == (0, 0, 0))


def test_a_crowd_is_answered_by_one_token(monkeypatch):
    with serving() as server:
        engine = server.engine.llm.engine
        add, adding, go_on = engine.add, [], threading.Event()

        def held(request: Any) -> None:
            adding.append(request)
            assert go_on.wait(PATIENCE)
            add(request)

        monkeypatch.setattr(engine, "add", held)
        with ThreadPoolExecutor(8) as crowd:
            replies = [crowd.submit(server.get, HEALTH) for _ in range(8)]
            wait_for(lambda: server.service.open_requests == 8)
            go_on.set()
            assert [reply.result().status_code for reply in replies] == [200] * 8
        assert len(adding) == 1


def test_under_load_anybodys_token_will_do(monkeypatch):
    """No place is free, and none is taken."""
    with serving(lambda: slow(max_running_requests=1), max_queued_requests=0) as server, streaming(server):
        monkeypatch.setattr(server.service, "_one_token", lambda engine: pytest.fail("it has enough to do"))
        error_of(server.post(CHAT, json=chat()), 429)
        assert server.get(HEALTH).status_code == 200
        assert server.state() == (1, 0, 1)


def test_an_engine_that_is_stuck(monkeypatch):
    monkeypatch.setattr("eyas.server.service.ALIVE", 0.2)
    with serving(model) as server:
        engine = server.engine.llm.engine
        step, go_on = engine.step, threading.Event()

        def stuck(hear: Any) -> Any:
            assert go_on.wait(PATIENCE)
            return step(hear)

        engine.step = stuck
        for _ in range(3):
            error = error_of(server.get(HEALTH), 503)
            assert error["code"] == "no_token" and "0.2 seconds" in error["message"]
        assert server.get("/health").status_code == 200  # which does not ask the engine
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.post, CHAT, json=chat())
            wait_for(lambda: server.service.in_flight == 1)
            error_of(server.get(HEALTH), 503)
            go_on.set()
            assert answer.result().status_code == 200
        monkeypatch.setattr("eyas.server.service.ALIVE", PATIENCE)
        assert server.get(HEALTH).status_code == 200
        wait_for(lambda: server.state() == (0, 0, 0))


def test_who_does_not_wait_for_it_leaves_nothing():
    with serving() as server:
        engine = server.engine.llm.engine
        add, go_on = engine.add, threading.Event()
        engine.add = lambda request: go_on.wait(PATIENCE) and add(request)
        with pytest.raises(httpx.ReadTimeout), server.http() as client:
            client.get(HEALTH, timeout=httpx.Timeout(PATIENCE, read=0.2))
        wait_for(lambda: server.service.open_requests == 0)
        go_on.set()
        wait_for(lambda: server.state() == (0, 0, 0))
        assert server.get(HEALTH).status_code == 200


def test_a_target_that_makes_nonsense():
    def load() -> LLM:
        made = LLM(tiny.poisoned(), tiny.tokenizer(), context_length=128)
        with torch.no_grad():
            made.target.model.get_input_embeddings().weight.fill_(torch.nan)
        return made

    with serving(load) as server:
        error = error_of(server.get(HEALTH), 503)
        assert error["code"] == "no_token" and "NaN" in error["message"]


def test_before_and_after():
    go_on = threading.Event()
    server = Live(lambda: go_on.wait(PATIENCE) and model(), ready=False)  # type: ignore[arg-type, return-value]
    assert error_of(server.get(HEALTH), 503)["code"] == "loading"
    go_on.set()
    wait_for(lambda: server.service.status == "ready")
    server.engine.close()
    assert error_of(server.get(HEALTH), 503)["code"] == "engine_stopped"
    server.close()


def test_no_key_is_needed():
    with serving(model, api_key="k") as server:
        assert server.get(HEALTH).status_code == 200
        error_of(server.get("/model_info"), 401)


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_the_model_in_sglangs_names(live, path):
    llm = live.service.llm
    assert live.get(path).json() == {
        "model_path": llm.name,
        "tokenizer_path": llm.tokenizer.name_or_path,
        "served_model_name": MODEL,
        "is_generation": True,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "llama",
        "architectures": llm.target.model.config.architectures,
    }


def test_the_acceptance_length_where_sglangs_clients_look_for_it():
    with serving(model) as server:
        (state,) = server.get("/server_info").json()["internal_states"]
        assert state == {"avg_spec_accept_length": None, "effective_max_running_requests_per_dp": 4}
        usage = server.post(CHAT, json=chat(max_tokens=40)).json()["usage"]
        info = server.get("/get_server_info").json()
        (state,) = info["internal_states"]
        assert state["avg_spec_accept_length"] == usage["speculative"]["acceptance_length"] > 1
        assert info == server.get("/server_info").json()
