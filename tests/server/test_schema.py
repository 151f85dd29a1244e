"""Requests made up from the server's own OpenAPI description, right ones and wrong ones: none may break it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from server.live import MODEL, Live, model

from eyas.server.app import make_app
from eyas.server.pages import PAGES
from eyas.server.service import Service
from eyas.server.settings import Settings

schemathesis = pytest.importorskip("schemathesis")
checks = pytest.importorskip("schemathesis.checks")
APP: Any = make_app(Service(Settings(MODEL))).app
SCHEMA = schemathesis.openapi.from_dict(APP.openapi())


@pytest.fixture(scope="module")
def modest():
    """Takes few answers at a time, so that none asks for much."""
    server = Live(lambda: model(context_length=48), max_queued_requests=2)
    yield server
    assert server.state() == (0, 0, 0)
    server.close()


@SCHEMA.parametrize()
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_nothing_breaks_the_server(case, modest):
    reply = case.call(base_url=modest.url, timeout=20)
    case.validate_response(reply, checks=[checks.not_a_server_error])
    if reply.status_code >= 400 and reply.content:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_every_address_but_the_pages_for_browsers_is_described():
    served = {(method, route.path) for route in APP.routes for method in route.methods}
    described = {(method.upper(), path) for path, item in APP.openapi()["paths"].items() for method in item}
    own = {("GET", "/openapi.json"), ("HEAD", "/openapi.json")}
    hidden = served - {(method, path.replace("{name}", "{name:path}")) for method, path in described}
    assert {address for address in hidden if address[1] not in PAGES} == own
    assert {path for _, path in described} >= {"/v1/chat/completions", "/v1/completions", "/tokenize", "/flush_cache"}
