"""Requests made up from the server's own OpenAPI description, right ones and wrong ones: none may break it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from server.live import MODEL, Live, model

from eyas.server.app import make_app
from eyas.server.service import Service
from eyas.server.settings import Settings

schemathesis = pytest.importorskip("schemathesis")
checks = pytest.importorskip("schemathesis.checks")
SCHEMA = schemathesis.openapi.from_dict(make_app(Service(Settings(MODEL))).app.openapi())  # type: ignore[attr-defined]


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
