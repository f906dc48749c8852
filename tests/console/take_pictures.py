"""Pictures of the console for the README, of a real model on the CPU, under load: run this file."""

from __future__ import annotations

import random
import shutil
import sys
import threading
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from console.conftest import CHROMIUM  # noqa: E402
from server.http_server import CHAT, HttpServer  # noqa: E402

MODEL = "smollm2-135m-instruct"
OUT = ROOT / "docs" / "images"
TOPICS = ("rivers", "oceans", "bridges", "trains", "the moon", "bread", "clocks", "whales")
NUM_CLIENTS = 11
PATIENCE_MS = 120_000
QUESTION = "What is the capital of France, and what is it famous for?"


def main() -> None:
    """Write console.png and console-dark.png."""
    server = HttpServer(
        MODEL,
        settings={"served_model_names": (MODEL,)},
        device="cpu",
        block_size=16,
        num_blocks=128,
        max_num_seqs=10,
        swap_space_gib=0.25,
    )
    enough = threading.Event()
    clients = [threading.Thread(target=ask, args=(server, number, enough)) for number in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    try:
        take(server.url)
    finally:
        enough.set()
        for client in clients:
            client.join()
        server.close()


def take(url: str) -> None:
    """After a minute, so that the timeline is full."""
    with sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, CHROMIUM)))
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 920}, device_scale_factor=1.5, color_scheme="light")
        page.goto(url)
        page.wait_for_timeout(62_000)
        converse(page)
        page.screenshot(path=OUT / "console.png")
        page.emulate_media(color_scheme="dark")
        page.wait_for_timeout(1000)
        page.screenshot(path=OUT / "console-dark.png")
        browser.close()


def converse(page: Page) -> None:
    """One question that is answered, and one that is being answered."""
    page.get_by_text("Sampling").click()
    page.locator("#temperature").fill("0.2")
    page.get_by_text("Sampling").click()
    page.get_by_label("Message").fill(QUESTION)
    page.keyboard.press("Enter")
    page.locator(".answer .meta", has_text="first after").wait_for(timeout=PATIENCE_MS)
    page.get_by_label("Message").fill("Tell me more about its museums, as a list")
    page.keyboard.press("Enter")
    page.wait_for_function(
        "() => document.querySelectorAll('.answer .prose')[1]?.innerText.length > 220", timeout=PATIENCE_MS
    )


def ask(server: HttpServer, seed: int, enough: threading.Event) -> None:
    """A client with requests of many kinds, one after the other."""
    choose = random.Random(seed)
    while not enough.is_set():
        text = f"Please write about {choose.choice(TOPICS)}. " + "Be vivid. " * choose.randrange(0, 60)
        with server.client() as client:
            client.post(
                CHAT,
                json={
                    "messages": [{"role": "user", "content": text}],
                    "max_tokens": choose.randrange(40, 220),
                    "ignore_eos": True,
                    "user": choose.choice(("web", "batch", "eval")),
                },
                timeout=300,
            )
        enough.wait(choose.random() * 3)


if __name__ == "__main__":
    main()
