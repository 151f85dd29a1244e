"""/flush_cache and /version."""

from __future__ import annotations

from server.live import CHAT, chat, wait_for
from server.test_errors import error_of
from server.test_faults import serving, streaming

from eyas import __version__


def test_the_prefix_cache_is_emptied(live):
    long = chat(messages=[{"role": "user", "content": " ".join(f"w{n}" for n in range(20, 60))}], max_tokens=2)

    def cached() -> int:
        return live.post(CHAT, json=long).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 16
    reply = live.post("/flush_cache")  # no body and no type, as eyas bench and curl send it
    assert reply.status_code == 200 and reply.json() == {"success": True}
    assert cached() == 0 and cached() > 16


def test_a_cache_in_use_is_not_emptied():
    with serving() as server:
        with streaming(server):
            reply = server.post("/flush_cache")
            assert error_of(reply)["code"] == "not_idle" and reply.headers["retry-after"] == "1"
        wait_for(lambda: server.state() == (0, 0, 0))  # its caller has left
        assert server.post("/flush_cache", json={}).json() == {"success": True}


def test_a_page_in_a_browser_empties_nothing(live):
    error_of(live.post("/flush_cache", headers={"Origin": "http://elsewhere"}), 415)
    error_of(live.post("/flush_cache", content=b"x"), 415)
    error_of(live.post(CHAT))


def test_a_key_is_asked_for():
    with serving(api_key="k") as server:
        for reply in (server.post("/flush_cache"), server.get("/version"), server.post("/tokenize", json={})):
            error_of(reply, 401)
        assert server.get("/version", headers={"X-API-Key": "k"}).json() == {"version": __version__}
