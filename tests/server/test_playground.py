"""The playground in a real browser, on a live server."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from browser import SCHEMES, WIDTHS, brightness, chromium, looks_right, opened
from cli import tiny
from server.live import CHAT, COMPLETIONS, Live, chat, completion, model, plainly, wait_for
from server.test_faults import slow
from tokenizers import Tokenizer

from eyas.core import SamplingParams
from eyas.engine.llm import load
from eyas.server.pages import FOLDER, PAGES

ASKED = "w5 w9 w77"
TEMPERATURE, TOKENS = 5, 60  # noise rules, and the drafter shares it: many drafts are accepted


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as made:
        yield made


def fill(page: Any, **values: Any) -> None:
    for name, value in {"temperature": TEMPERATURE, "most": TOKENS, **values}.items():
        page.locator(f"#{name}").evaluate("(field, value) => { field.value = value; }", str(value))


def ask(page: Any, text: str = ASKED, **values: Any) -> str:
    """Asks, and returns the answer once it is whole."""
    before = page.locator("article").count()
    fill(page, **values)
    page.fill("#ask", text)
    page.press("#ask", "Enter")
    page.wait_for_selector(f"article:nth-of-type(1):not(.busy) >> nth={before}", state="attached")
    return page.locator("article .words").last.text_content()


def expected(asked: Any, **sampling: Any) -> str:
    return plainly(
        asked, SamplingParams(**{"temperature": TEMPERATURE, "max_tokens": TOKENS, "seed": 7, **sampling})
    ).text


# What the server gives to a browser


@pytest.mark.parametrize("path", PAGES)
def test_the_pages_load_nothing_from_elsewhere(live, path):
    reply = live.get(path)
    assert reply.status_code == 200 and reply.content == (FOLDER / PAGES[path]).read_bytes()
    policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert (reply.headers["x-content-type-options"], reply.headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert not re.search(r"https?://(?!www\.w3\.org/)|innerHTML|\sstyle=|\son\w+=", reply.text)
    head = live._client.head(path)
    assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(len(reply.content)))
    refused = live.post(path, json={})
    assert refused.status_code == 405 and refused.json()["error"]["code"] == "method_not_allowed"


def test_the_pages_are_no_part_of_the_api(live):
    assert not set(PAGES) & set(live.get("/openapi.json").json()["paths"])
    for path in ("/playground", "/playground/", "/playground/../app.py", "/playground/nothing.js", "/favicon.ico"):
        assert live.get(path).status_code == 404
    assert live.get("/", headers={"Host": "evil.example"}).status_code == 403


def test_draft_positions(live):
    """Beside the token ids, chunk by chunk and at once; the positions are those of an accepted run."""
    asked = {"temperature": TEMPERATURE, "max_tokens": TOKENS, "return_draft_positions": True, "return_token_ids": True}
    for path, request in ((CHAT, chat(**asked)), (COMPLETIONS, completion(**asked))):
        whole = live.post(path, json=request).json()
        (choice,) = whole["choices"]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        stream = {**request, "stream": True, "stream_options": {"include_usage": True}}
        lines = [line[6:] for line in live.post(path, json=stream).text.split("\n\n")[:-2]]
        steps = [c for line in lines for c in json.loads(line)["choices"] if "token_ids" in c]
        for name in ("token_ids", "draft_positions", "token_texts"):
            assert [item for step in steps for item in step[name]] == choice[name]
        assert "".join(choice["token_texts"]) == text
        accepted = sum(position > 0 for position in choice["draft_positions"])
        assert accepted == whole["usage"]["speculative"]["accepted"] >= 10
        assert steps[0]["draft_positions"] == [0], "the first token is the prompt's"
        for step in steps[1:-1]:
            count = len(step["token_ids"])
            assert step["draft_positions"] == [*range(1, count), 0]
    assert "draft_positions" not in live.post(CHAT, json=chat()).json()["choices"][0]


# A conversation


def test_an_answer_with_its_drafts(live, browser):
    with opened(browser, live.url) as page:
        page.wait_for_selector("#state[data-is=ready]")
        assert "tiny" in page.inner_text("#model") and "float32" in page.inner_text("#model")
        with page.expect_response(f"**{CHAT}") as reply:
            text = ask(page)
        first = [{"role": "user", "content": ASKED}]
        assert text == expected(first)
        events = [line[6:] for line in reply.value.text().split("\n\n") if line.startswith("data: {")]
        seen = json.loads(events[-1])["usage"]["speculative"]
        tinted = page.locator("article .draft")
        assert tinted.count() == seen["accepted"] >= 10
        assert tinted.first.get_attribute("title") == "draft position 1"
        facts = page.inner_text(".facts")
        for fact in (f"{TOKENS} tokens", f"{seen['steps']} verify steps", f"{seen['accepted']} accepted", "seed 7"):
            assert fact in facts
        assert f"acceptance length {seen['acceptance_length']:.2f}" in facts and "cut off at its limit" in facts
        assert page.locator("#steps .accepted").count() > 5 and float(page.inner_text("#length")) > 1
        share = float(page.inner_text("#share").rstrip("%")) / 100
        assert share == pytest.approx(seen["accepted"] / TOKENS, abs=0.01)
        # the next turn, plainly: it knows the first one, and nothing is tinted
        page.uncheck("#speculation")
        again = ask(page, "w8", most=5)
        turns = [*first, {"role": "assistant", "content": text}, {"role": "user", "content": "w8"}]
        assert again == expected(turns, max_tokens=5)
        assert page.locator("article").last.locator(".draft").count() == 0
        page.click("#clear")
        assert page.locator("article").count() == 0 and page.is_visible("#empty")


def test_the_same_seed_says_the_same_either_way(live, browser):
    with opened(browser, live.url) as page:
        page.wait_for_selector("#state[data-is=ready]")
        fill(page, seed=11, system="w3 w4")
        page.fill("#ask", ASKED)
        page.click("#compare")
        page.wait_for_selector(".verdict")
        texts = page.locator("article .words").all_text_contents()
        told = [{"role": "system", "content": "w3 w4"}, {"role": "user", "content": ASKED}]
        assert texts == 2 * [expected(told, seed=11)]
        assert page.inner_text(".verdict").startswith(f"The same {TOKENS} tokens: ")
        assert [page.locator("article").nth(n).locator(".draft").count() > 0 for n in (0, 1)] == [False, True]
        fill(page, seed=12)
        page.click("#compare")  # nothing is typed: the last question again
        page.wait_for_selector("article:not(.busy) .facts:has-text('seed 12') >> nth=1")
        assert page.locator("article").count() == 2
        assert page.locator("article .words").all_text_contents()[0] == expected(told, seed=12) != texts[0]


def test_answers_that_differ_are_said_to(live, browser):
    """A server that does not keep the promise, in the place of ours."""

    def lie(route: Any) -> None:
        asked = route.request.post_data_json
        texts = ["w5 ", "w6", " w7"] if asked["speculation"] == "off" else ["w5 ", "w8", " w7"]
        choice = {"delta": {"content": "".join(texts)}, "finish_reason": "stop", "token_ids": [5, int(texts[1][1]), 7]}
        choice |= {"draft_positions": [0, 0, 0], "token_texts": texts}
        body = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
        route.fulfill(body=body, content_type="text/event-stream")

    with opened(browser, live.url) as page:
        page.route(f"**{CHAT}", lie)
        page.wait_for_selector("#state[data-is=ready]")
        page.fill("#ask", ASKED)
        page.click("#compare")
        words = page.inner_text(".verdict.parted")
        assert words.startswith("They part at token 2: “w6” without speculation, “w8” with it.")


def test_stopping_frees_the_server(browser):
    server = Live(lambda: slow(max_running_requests=1))
    with opened(browser, server.url) as page:
        page.wait_for_selector("#state[data-is=ready]")
        fill(page, most=200)
        page.fill("#ask", ASKED)
        page.press("#ask", "Shift+Enter")
        page.type("#ask", "w8")
        page.press("#ask", "Enter")
        page.wait_for_selector("article .draft")
        assert server.state() == (1, 0, 1) and page.is_disabled("#compare")
        page.click("#stop")
        wait_for(lambda: server.state() == (0, 0, 0), seconds=10)
        made = re.search(r"^eyas:generation_tokens_total (\S+)", server.get("/metrics").text, re.M)
        assert made and float(made[1]) < 200, "it was not stopped, it ended"
        page.wait_for_selector("article:not(.busy)")
        assert "stopped" in page.inner_text(".facts") and page.is_visible("#send")
        assert page.inner_text(".said") == f"{ASKED}\nw8"
        part = page.locator("article .words").text_content()
        assert 0 < len(part.split()) < 200 and expected(
            [{"role": "user", "content": f"{ASKED}\nw8"}], max_tokens=200
        ).startswith(part)
        assert len(ask(page, "w9", most=3).split()) == 3
    server.close()


def test_what_the_server_refuses_is_shown_in_its_words(live, browser):
    with opened(browser, live.url, faults=("status of 400",)) as page:
        page.wait_for_selector("#state[data-is=ready]")
        ask(page, " ".join(300 * ["w5"]))
        assert "context" in page.inner_text("article .error") and "shorten it" in page.inner_text("article .error")
        assert page.input_value("#ask").startswith("w5 w5"), "to be mended and asked again"
        fill(page, temperature=-1)
        page.press("#ask", "Enter")
        assert page.locator("article").count() == 1, "the field says itself what is wrong"
        assert page.evaluate("document.activeElement.id") == "temperature"


def test_the_key_is_asked_for(browser):
    server = Live(api_key="sécret")
    assert server.get("/").status_code == server.get("/playground/playground.js").status_code == 200
    assert server.get("/server_info").status_code == 401
    with opened(browser, server.url, faults=("status of 401",)) as page:
        page.wait_for_selector("#door[open]")
        assert page.inner_text("#refusal") == ""
        for key, after in (("wrong", "#refusal:not(:empty)"), ("sécret", "#state[data-is=ready]")):
            page.fill("#key", key)
            page.press("#key", "Enter")
            page.wait_for_selector(after)
        assert not page.is_visible("#door") and len(ask(page, most=3).split()) == 3
        page.reload()
        page.wait_for_selector("#state[data-is=ready]")
        assert page.url == f"{server.url}/" and page.context.cookies() == []
    server.close()


def test_markup_that_a_model_writes_is_text(browser):
    def written() -> Any:
        """Every word of this target is an element that would run a script."""
        made = model()
        words = made.tokenizer.backend_tokenizer
        nasty = re.sub(r'"w(\d+)":', r'"<img/src=x/onerror=document.title=\1>":', words.to_str())
        made.tokenizer._tokenizer = Tokenizer.from_str(nasty)
        return made

    server = Live(written)
    with opened(browser, server.url) as page:
        page.wait_for_selector("#state[data-is=ready]")
        text = ask(page, "<b>bold</b>")
        assert text.count("<img/src=x/onerror=document.title=") >= TOKENS - 3
        assert page.locator("#log img, #log b >> text=bold").count() == 0 and page.title() == "Eyas playground"
        assert page.inner_text(".said") == "<b>bold</b>"
    server.close()


def test_images_for_a_target_that_sees(tmp_path, browser, live):
    from PIL import Image

    folder = tiny.save_seeing(tmp_path / "seeing")
    server = Live(lambda: load(str(folder), dtype="float32"))
    picture = tmp_path / "bird.png"
    Image.new("RGB", (24, 16), (200, 30, 30)).save(picture)
    with opened(browser, server.url) as page:
        page.wait_for_selector("#state[data-is=ready]")
        assert page.is_disabled("#speculation") and page.is_disabled("#compare"), "it has no drafter"
        page.set_input_files("#file", picture)
        page.wait_for_selector("#images img[alt='bird.png']")
        with page.expect_request(f"**{CHAT}") as asked:
            text = ask(page, most=6, temperature=0)
        (message,) = asked.value.post_data_json["messages"]
        assert message["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
        with_image = server.post(CHAT, json={"messages": [message], "temperature": 0, "max_tokens": 6}).json()
        assert text == with_image["choices"][0]["message"]["content"]
        assert page.get_attribute(".said img", "alt") == "bird.png" and not page.is_visible("#images")
    server.close()
    with opened(browser, live.url) as page:
        page.wait_for_selector("#state[data-is=ready]")
        assert not page.is_visible("#picking")


# How it looks


@pytest.mark.parametrize("width", WIDTHS)
def test_it_can_be_read(live, browser, width):
    with opened(browser, live.url, width=width) as page:
        page.wait_for_selector("#state[data-is=ready]")
        fill(page, most=24)
        page.fill("#ask", "w5" * 60)
        page.click("#compare")
        page.wait_for_selector(".verdict")
        if not page.locator("#settings").evaluate("(settings) => settings.open"):
            page.click("summary")
        for scheme in SCHEMES:
            page.emulate_media(color_scheme=scheme)
            looks_right(
                page, "h1, #model, dt, dd, label, .words, .draft, .facts, .verdict, button:enabled, .soft, small"
            )
            assert (brightness(page) > 0.9) if scheme == "light" else (brightness(page) < 0.15)
        for field in page.query_selector_all("input:not([type=file]), textarea"):
            assert field.evaluate("(field) => field.labels.length"), "a field without a label"


def test_a_server_that_loads_says_so(browser):
    gate = threading.Event()

    def late() -> Any:
        gate.wait(60)
        return model()

    server = Live(late, ready=False)
    with opened(browser, server.url, faults=("status of 503",)) as page:
        page.wait_for_selector("#state:has-text('still being loaded')")
        assert page.is_disabled("#send")
        gate.set()
        page.wait_for_selector("#state[data-is=ready]")
    server.close()
