"""Pages as people see them: in a real Chromium, without a screen, where nothing may go wrong unnoticed."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDTHS, SCHEMES = (1280, 390), ("light", "dark")
PATIENCE = 60_000  # milliseconds

# What matches a selector and can be seen, with the contrast to what is behind it, as WCAG computes it: half-transparent
# colours lie on one another.
CONTRASTS = """(selector) => {
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const light = (colour) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => {
    const c = colour[i] / 255;
    return sum + weight * (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  }, 0);
  const contrast = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    const behind = layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
    const [a, b] = [light(over(parse(getComputedStyle(element).color), behind)), light(behind)];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  };
  const seen = [...document.querySelectorAll(selector)].filter((element) => element.checkVisibility());
  return seen.map((element) => [contrast(element), element.textContent.slice(0, 60)]);
}"""


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser for the tests of one module: its driver occupies the thread's event loop while it is there."""
    path = os.environ.get("EYAS_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        skip("there is no Chromium: install Debian's package chromium, or name one in EYAS_CHROMIUM")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        skip("there is no driver: pip install playwright (it needs no browser of its own)")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path)
        yield browser
        browser.close()


def skip(why: str) -> None:
    warnings.warn(f"PAGES ARE NOT TESTED: {why}.", stacklevel=2)
    pytest.skip(f"PAGES ARE NOT TESTED: {why}.")


@contextmanager
def opened(browser: Any, url: str, *, width: int = 1280, faults: tuple = ()) -> Iterator[Any]:
    """A page that may load nothing from elsewhere. What goes wrong on it fails, but for messages with ``faults``."""
    context = browser.new_context(viewport={"width": width, "height": 844})
    context.set_default_timeout(PATIENCE)
    page, seen = context.new_page(), []
    page.on("console", lambda message: seen.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("request", lambda request: seen.append(request.url) if elsewhere(request.url, url) else None)
    try:
        page.goto(url)
        yield page
        page.wait_for_timeout(20)  # messages are told a little later
        assert [told for told in seen if not any(fault in told for fault in faults)] == []
    finally:
        print(*seen, sep="\n")  # for whoever reads why a test failed
        context.close()


def elsewhere(url: str, home: str) -> bool:
    return not url.startswith((home, "data:"))


def looks_right(page: Any, texts: str) -> None:
    """Nothing is wider than the window, and what matches the selector ``texts`` is easy to read (WCAG AA)."""
    wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide[0] <= wide[1], "the page scrolls sideways"
    found = page.evaluate(CONTRASTS, texts)
    assert found, "there is nothing to read"
    assert [text for contrast, text in found if contrast < 4.5] == [], "too little contrast"


def brightness(page: Any) -> float:
    """Of the page behind everything, 0 to 1."""
    return page.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((s, n) => s + +n, 0) / 765"
    )
