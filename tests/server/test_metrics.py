"""What /metrics and /server_info say, against what the answers themselves said."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import prometheus_client
import pytest
from engine.harness import TREE
from prometheus_client.parser import text_string_to_metric_families
from server.live import CHAT, COMPLETIONS, Live, chat, completion, wait_for
from server.test_faults import slow, streaming

from eyas.bridges.sglang.metrics import draft_shape


def samples(server: Live) -> dict[tuple[str, ...], float]:
    """By name and label values."""
    reply = server.get("/metrics")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(reply.text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


@pytest.fixture
def own():
    server = Live()
    yield server
    server.close()


def test_counts_are_those_of_the_answers(own):
    asked: list[tuple[str, dict[str, Any]]] = [
        (CHAT, chat(max_tokens=30)),
        (CHAT, chat(n=3, seed=8, speculation="off")),
        (COMPLETIONS, completion(prompt=["w5", "w9 w7"], max_tokens=25)),
    ]
    usages = [own.post(path, json=body).json()["usage"] for path, body in asked]
    own.post(CHAT, json={})
    own.get("/nothing")
    seen = samples(own)
    total: Counter[str] = Counter()
    for usage in usages:
        total.update({k: usage[k] for k in ("prompt_tokens", "completion_tokens")} | dict(usage["speculative"].items()))
    assert seen["eyas:generation_tokens_total",] == total["completion_tokens"] == 30 + 36 + 50
    assert seen["eyas:prompt_tokens_total",] == 5 + 3 * 5 + 3
    assert seen["eyas:request_success_total", "length"] == 6
    assert seen["eyas:http_requests_total", CHAT, "200"] == 2 and seen["eyas:http_requests_total", CHAT, "400"] == 1
    assert seen["eyas:http_requests_total", "-", "404"] == 1
    assert seen["eyas:spec_decode_num_drafts_total",] == total["steps"] > 0
    assert seen["eyas:spec_decode_num_draft_tokens_total",] == total["drafted"]
    assert seen["eyas:spec_decode_num_accepted_tokens_total",] == total["accepted"]
    emitted = sum(round(u["speculative"]["acceptance_length"] * u["speculative"]["steps"]) for u in usages)
    assert seen["eyas:spec_decode_num_emitted_tokens_total",] == emitted
    assert seen["eyas:acceptance_length",] == pytest.approx(emitted / total["steps"])
    by_position = [v for k, v in seen.items() if k[0] == "eyas:spec_decode_num_accepted_tokens_per_pos_total"]
    assert sum(by_position) == total["accepted"]
    assert seen["eyas:spec_decode_num_reached_per_pos_total", "0"] == total["steps"]
    assert seen["eyas:time_to_first_token_seconds_count",] == seen["eyas:e2e_request_latency_seconds_count",] == 6
    assert seen["eyas:inter_token_latency_seconds_count",] == total["completion_tokens"] - 6
    assert 0 < seen["eyas:time_to_first_token_seconds_sum",] <= seen["eyas:e2e_request_latency_seconds_sum",]
    choices = {k[1]: v for k, v in seen.items() if k[0] == "eyas:policy_steps_total"}
    assert choices["plain"] > 0 and any("tree" in choice for choice in choices)
    assert seen["process_resident_memory_bytes",] > 0 and seen["eyas:kv_cache_usage_perc",] == 0


def test_the_queue_is_seen():
    server = Live(lambda: slow(max_running_requests=1))
    with streaming(server, max_tokens=60), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.post, CHAT, json=chat(max_tokens=2))
        wait_for(lambda: server.state()[1] == 1)
        seen = samples(server)
        assert (seen["eyas:num_requests_running",], seen["eyas:num_requests_waiting",]) == (1, 1)
        assert 0 < seen["eyas:kv_cache_usage_perc",] <= 1
        info = server.get("/server_info").json()
        assert (info["num_running_reqs"], info["num_queue_reqs"]) == (1, 1)
        assert waiting.result().status_code == 200
    server.close()


def test_two_servers_count_apart_and_nothing_is_global(own):
    other = Live()
    own.post(CHAT, json=chat(max_tokens=3))
    assert samples(own)["eyas:generation_tokens_total",] == 3
    assert samples(other)["eyas:generation_tokens_total",] == 0
    assert "eyas" not in prometheus_client.generate_latest().decode()
    other.close()


def test_server_info(own):
    usage = own.post(CHAT, json=chat(max_tokens=30)).json()["usage"]["speculative"]
    info = own.get("/server_info").json()
    assert draft_shape(info) == TREE and info["speculation"] == "fixed"
    assert info["acceptance"]["length"] == usage["acceptance_length"] and info["acceptance"]["steps"] == usage["steps"]
    assert info["max_running_requests"] == 4 and info["context_length"] == 256 and info["served_model_name"] == "tiny"
    assert sum(info["policy"]["shares"].values()) == pytest.approx(1)
    models = own.openai().models
    assert [m.id for m in models.list()] == ["tiny"] and models.retrieve("tiny").max_model_len == 256
