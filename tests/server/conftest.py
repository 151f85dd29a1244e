from __future__ import annotations

from collections.abc import Iterator

import pytest
from server.live import Live


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    """Drafts trees, four answers at a time. Tests leave it as they found it."""
    server = Live()
    yield server
    server.close()
    assert server.finished


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "live" in request.fixturenames:
        from server.live import wait_for

        server = request.getfixturevalue("live")
        wait_for(lambda: server.state() == (0, 0, 0))
