"""The report of a benchmark in a real browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from bench import made
from browser import SCHEMES, WIDTHS, brightness, chromium, looks_right, opened

from eyas.bench import report
from eyas.bench.passes import Level

LEVELS = [Level("concurrency", n) for n in (1, 4, 16)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    spent = {"draft": 0.7, "target": 2.1, "rest": 0.2, "steps": 100}
    results = made.results(made.pairs(LEVELS, [1.6, 1.3, 0.9], ("chat", "code"), spent=spent), 3600.0)
    results["profile"] = made.profile(LEVELS[::2])
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(report.html(json.loads(json.dumps(results))))
    return file.as_uri()


@pytest.mark.parametrize("width", WIDTHS)
def test_it_can_be_read(page_file, browser, width):
    with opened(browser, page_file, width=width) as page:
        assert page.locator("svg").count() == 3 + 2 + 2 * 3, (
            "speedup, acceptance, steps; profiles and latencies at both ends"
        )
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            looks_right(page, "h1, h2, h3, p, strong, b, td, th, pre, mark, dt, dd, li")
            assert (brightness(page) > 0.9) if scheme == "light" else (brightness(page) < 0.15)
