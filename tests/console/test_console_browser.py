"""The console in a real browser: what a person sees and does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from console.conftest import SLOW, Watched
from isthmus.server.auth import ApiKey
from server.http_server import CHAT, COMPLETIONS, MODEL, HttpServer, serving

SHOTS = Path("reports", "console")
NASTY = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@contextmanager
def answers(page: Page, **fields: Any) -> Iterator[list[dict[str, Any]]]:
    """Requests of the playground get these fields besides; gives their bodies."""
    bodies: list[dict[str, Any]] = []

    def change(route: Route) -> None:
        body = json.loads(route.request.post_data or "")
        bodies.append(body)
        route.continue_(post_data=json.dumps({**body, **fields}))

    page.route(f"**{CHAT}", change)
    yield bodies
    page.unroute(f"**{CHAT}")


def endless(page: Page) -> Any:
    return answers(page, ignore_eos=True, max_tokens=39_000, seed=1)


def events(*contents: str) -> str:
    """A stream of an answer in these pieces."""
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in contents]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def say(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def tile(page: Page, name: str) -> Any:
    return page.locator(f"#tile-{name} .value")


def test_a_chat_from_the_first_token_to_the_stop(page: Page, server: HttpServer) -> None:
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator("#model")).to_have_text(MODEL)
    expect(page.locator("#requests .none")).to_be_visible()
    answer = page.locator(".turn.answer .prose")
    with endless(page):
        say(page, "Hello")
        expect(page.locator(".turn.user")).to_have_text("Hello")
        expect(answer).not_to_be_empty()
        length = len(answer.inner_text())
        page.wait_for_function("n => document.querySelector('.turn.answer .prose').innerText.length > n", arg=length)
        expect(page.locator("#speed")).to_have_text(re.compile(r"^[\d.]+ tokens/s$"))
        expect(tile(page, "running")).to_have_text("1")
        row = page.locator("#requests tbody tr", has_text="yours")
        expect(row).to_contain_text("decode")
        expect(page.locator("#timeline g.live rect.mine")).to_have_count(1)
        expect(page.locator("#timeline g.live rect[data-phase=decode]")).to_have_count(1)
        expect(page.get_by_role("button", name="Send")).to_be_hidden()
        page.get_by_role("button", name="Stop").click()
    expect(page.locator(".turn.answer .meta")).to_have_text(re.compile(r"^[\d,]+ tokens · .*stopped$"))
    expect(page.locator("#speed")).to_be_empty()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    expect(page.locator("#requests .none")).to_be_visible()
    expect(tile(page, "running")).to_have_text("0")
    expect(page.locator("#timeline g.live")).to_have_count(0)
    expect(page.locator("#timeline rect[data-phase=cut]").first).to_be_visible()
    server.wait_until(server.is_idle)


def test_a_conversation_goes_on_and_can_begin_anew(page: Page) -> None:
    with answers(page, seed=3, ignore_eos=True) as bodies:
        page.get_by_text("Sampling").click()
        page.get_by_label("Max tokens").fill("6")
        page.get_by_label("Seed").fill("3")
        page.get_by_label("System prompt").fill("Be brief.")
        say(page, "One")
        expect(page.locator(".turn.answer .meta")).to_contain_text("6 tokens")
        first = page.locator(".turn.answer .prose").inner_text()
        say(page, "Two")
        expect(page.locator(".turn.answer .meta")).to_have_count(2)
        expect(page.locator(".turn.answer .meta").last).to_contain_text("length")
    assert [message["role"] for message in bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert bodies[1]["messages"][0]["content"] == "Be brief."
    assert bodies[1]["messages"][2]["content"].split() == first.split()
    assert (bodies[0]["max_tokens"], bodies[0]["seed"], bodies[0]["temperature"]) == (6, 3, 0.7)
    assert "top_k" not in bodies[0]
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.get_by_text("Say something to the model.")).to_be_visible()
    expect(page.get_by_label("Message")).to_be_focused()


def test_the_live_view_shows_others_and_what_holds_them(page: Page, server: HttpServer) -> None:
    body = {"prompt": "a", "max_tokens": 39_000, "ignore_eos": True, "stream": True, "user": "ann"}
    with server.client() as client:
        streams = [client.stream("POST", COMPLETIONS, json=body) for _ in range(6)]
        for stream in streams:
            stream.__enter__()
        expect(tile(page, "running")).to_have_text("4")
        expect(tile(page, "waiting")).to_have_text("2")
        expect(page.locator("#tile-waiting .sub")).to_have_text("2 for a seat")
        expect(tile(page, "kv")).not_to_have_text("0%")
        expect(tile(page, "output")).to_have_text(re.compile(r"^[\d,.]+k?$"))
        expect(page.locator("#requests tbody tr", has_text="ann")).to_have_count(6)
        expect(page.locator("#requests-note")).to_have_text("6 now")
        for stream in reversed(streams):
            stream.__exit__(None, None, None)
    expect(page.locator("#requests .none")).to_be_visible()
    server.wait_until(server.is_idle)
    server.ask(COMPLETIONS, prompt="a", max_tokens=9, ignore_eos=True)
    expect(page.locator("#latency tr[data-of=tpot_s] td").first).to_have_text(re.compile(r"^[\d.]+ (µs|ms|s)$"))
    row = page.locator("#platforms .used")
    expect(row).to_contain_text("null")
    expect(row).to_contain_text("in use")
    expect(page.locator("#platforms tbody tr", has_text="cpu").first).to_contain_text("yes")
    expect(page.locator("#facts")).to_contain_text("4,096 of 16 tokens")


def test_by_keyboard_alone(page: Page, server: HttpServer) -> None:
    expect(page.get_by_label("Message")).to_be_focused()
    page.keyboard.type("first line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second line")
    with endless(page):
        page.keyboard.press("Enter")
        expect(page.locator(".turn.user")).to_have_text("first line\nsecond line")
        expect(page.locator(".turn.answer .prose")).not_to_be_empty()
        expect(page.locator("#announce")).to_have_text("The answer is being written")
        page.keyboard.press("Escape")
    expect(page.locator(".turn.answer .meta")).to_contain_text("stopped")
    expect(page.locator("#announce")).to_contain_text("Answer stopped")
    server.wait_until(server.is_idle)
    page.locator("body").evaluate("() => document.activeElement.blur()")
    page.locator("a.skip").focus()
    order = []
    for _ in range(8):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.tagName.toLowerCase()"))
    assert order[:6] == ["theme", "clear", "talk", "message", "send", "summary"]
    page.get_by_text("Sampling").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.get_by_label("Temperature")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.locator("output[for=temperature]")).to_have_text("0.75")
    page.locator("#theme").focus()
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("Enter")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, textarea')].filter(one => !one.closest('dialog') && "
        "!(one.labels?.length || one.textContent.trim() || one.ariaLabel)).map(one => one.id)"
    )
    assert unnamed == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_as_the_system_says_until_somebody_chooses(page: Page, scheme: Any) -> None:
    other = "Dark" if scheme == "light" else "Light"
    page.emulate_media(color_scheme=scheme)
    page.reload()
    expect(page.locator("#status")).to_have_text("ready")
    button = page.locator("#theme")
    expect(button).to_have_text(other)
    say(page, "Hello")
    expect(page.locator(".turn.answer .meta")).to_contain_text("tokens")
    assert too_faint(page) == []
    page.screenshot(path=shot(scheme))
    mine = page.evaluate("getComputedStyle(document.body).backgroundColor")
    button.click()
    chosen = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert chosen != mine
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == chosen


def too_faint(page: Page) -> list[str]:
    """Texts with less contrast than WCAG's level AA asks for, 4.5 : 1, against what is behind them."""
    found: list[str] = page.evaluate(
        """() => {
          const parse = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
          const light = (rgb) => {
            const linear = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
            const [r, g, b] = rgb.slice(0, 3).map(v => linear(v / 255));
            return .2126 * r + .7152 * g + .0722 * b;
          };
          const behind = (e) => {
            for (; e; e = e.parentElement) {
              const colour = parse(getComputedStyle(e).backgroundColor);
              if (colour[3] > .99) return colour;
            }
            return [255, 255, 255];
          };
          return [...document.querySelectorAll('body *')]
            .filter(e => e.offsetParent && !e.disabled)
            .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
            .map(e => {
              const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
              return [(a + .05) / (b + .05), `${e.tagName}.${e.className} ${e.textContent.trim().slice(0, 30)}`];
            })
            .filter(([ratio]) => ratio < 4.5).map(([ratio, name]) => `${name}: ${ratio.toFixed(2)}`);
        }"""
    )
    return found


@pytest.mark.parametrize("width", [360, 768])
def test_on_a_small_screen(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 700})
    page.reload()
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator(".live")).to_be_hidden()
    assert overflow(page) == 0
    say(page, "Hello " * 30)
    expect(page.locator(".turn.answer .meta")).to_contain_text("tokens")
    expect(page.get_by_role("button", name="Send")).to_be_in_viewport(ratio=1)
    assert overflow(page) == 0
    page.screenshot(path=shot(f"{width}-chat"))
    page.get_by_role("button", name="Live", exact=True).click()
    expect(page.locator(".chat")).to_be_hidden()
    expect(tile(page, "running")).to_be_in_viewport(ratio=1)
    expect(page.locator("#platforms tbody tr").first).to_be_attached()
    assert overflow(page) == 0
    page.screenshot(path=shot(f"{width}-live"))
    page.get_by_role("button", name="Chat", exact=True).click()
    expect(page.locator(".turn.answer")).to_be_visible()


def overflow(page: Page) -> int:
    """Pixels that can only be seen by scrolling sideways."""
    found: int = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    return found


def shot(name: str) -> Path:
    SHOTS.mkdir(parents=True, exist_ok=True)
    return SHOTS / f"{name}.png"


def test_what_others_wrote_stays_text(page: Page, server: HttpServer) -> None:
    page.route(f"**{CHAT}", lambda route: route.fulfill(content_type="text/event-stream", body=events(NASTY, NASTY)))
    say(page, NASTY)
    expect(page.locator(".turn.answer .prose")).to_have_text(NASTY * 2)
    expect(page.locator(".turn.user")).to_have_text(NASTY)
    body = {"prompt": "a", "max_tokens": 39_000, "ignore_eos": True, "stream": True, "user": NASTY}
    headers = {"x-request-id": NASTY.replace(" ", "")}
    with server.client() as client, client.stream("POST", COMPLETIONS, json=body, headers=headers):
        expect(page.locator("#requests tbody")).to_contain_text(NASTY)
    assert page.locator("main img, main script").count() == 0
    server.wait_until(server.is_idle)


def test_answers_are_set_as_they_were_meant(page: Page) -> None:
    text = "# Head\nOne **two** `three`\n\n- a\n- b\n\n1. x\n2. *y*\n\n```python\nif a < b:\n    pass\n```\n\nend <b>"
    pieces = [text[start : start + 3] for start in range(0, len(text), 3)]
    page.route(f"**{CHAT}", lambda route: route.fulfill(content_type="text/event-stream", body=events(*pieces)))
    say(page, "Hello")
    expect(page.locator(".prose pre")).to_have_text("if a < b:\n    pass")
    for selector, expected in (
        (".heading", ["Head"]),
        ("strong", ["two"]),
        ("p code", ["three"]),
        ("ul li", ["a", "b"]),
        ("ol li", ["x", "y"]),
        ("em", ["y"]),
    ):
        expect(page.locator(f".prose {selector}")).to_have_text(expected)
    expect(page.locator(".prose > p").last).to_have_text("end <b>")


def test_an_answer_that_fails(page: Page, watched: Watched) -> None:
    with answers(page, max_tokens=0):
        say(page, "Hello")
        expect(page.locator(".turn .error")).to_contain_text("max_tokens")
    [by_the_browser] = watched.faults
    assert "400" in by_the_browser
    watched.faults.clear()
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_the_key_is_asked_for_and_kept_in_the_tab(browser: Browser, model: Path) -> None:
    with serving(model, settings={"api_keys": (ApiKey.of("s3cret", "me"),)}, **SLOW) as server:
        context = browser.new_context()
        page = context.new_page()
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(server.url)
        key = page.get_by_label("API key", exact=True)
        expect(key).to_be_focused()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert").first).to_have_text("That key is not one of this server's.")
        page.keyboard.type("s3cret")
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_have_text("ready")
        say(page, "Hello")
        expect(page.locator(".turn.answer .meta")).to_contain_text("tokens")
        assert page.evaluate("sessionStorage.getItem('isthmus-key')") == "s3cret"
        assert "s3cret" not in page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")
        page.reload()
        expect(page.locator("#status")).to_have_text("ready")
        assert faults == []
        context.close()


def test_nobody_is_asked_when_nobody_looks(page: Page, watched: Watched) -> None:
    expect(page.locator("#status")).to_have_text("ready")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(3200)
    assert 2 <= len(asked) <= 4
    assert set(asked) == {f"{watched.url}/console/state"}
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    page.wait_for_timeout(200)
    asked.clear()
    page.wait_for_timeout(2200)
    assert asked == []


def test_a_server_that_goes_away_is_shown(browser: Browser, model: Path) -> None:
    with serving(model, **SLOW) as server:
        page = browser.new_page()
        page.goto(server.url)
        expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator("#status")).to_have_text("not reached")
    page.close()
