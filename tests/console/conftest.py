"""A real browser, and a server whose answers take as long as a test wants to look at them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from isthmus.testing.tiny_models import tiny_model
from server.http_server import NULL, HttpServer, serving

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
SLOW = {**NULL, "num_blocks": 4096, "max_num_seqs": 4}


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = os.environ.get("ISTHMUS_CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM)), None)
    assert found is not None, "no Chromium here; install one (`nox -s console` does), or name it in ISTHMUS_CHROMIUM"
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("served") / "llama", max_len=40_000)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[HttpServer]:
    with serving(model, **SLOW) as found:
        yield found


class Watched:
    """A page, and all that it should not have done."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.faults: list[str] = []
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("dialog", lambda dialog: self.faults.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: None if request.url.startswith(url) else self.faults.append(request.url))

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"{message.type}: {message.text}")


@pytest.fixture
def watched(browser: Browser, server: HttpServer) -> Iterator[Watched]:
    """At 1280 x 800, on the console; nothing may be in the browser's log at the end, nor have come from elsewhere."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    found = Watched(context.new_page(), server.url)
    found.page.goto(server.url)
    yield found
    context.close()
    assert found.faults == []


@pytest.fixture
def page(watched: Watched) -> Page:
    return watched.page
