"""A server for tests: in a thread of the test's process, on a free port, spoken to over real sockets."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import torch
from openai import AsyncOpenAI, OpenAI

from isthmus import AsyncLLM
from isthmus.engine.engine_info import EngineStats
from isthmus.ops.sampling import GAMMA, mix64
from isthmus.server.app import make_context
from isthmus.server.context import ServerContext
from isthmus.server.lifecycle import make_http
from isthmus.server.listener import bind, url_of
from isthmus.server.settings import ServerSettings
from isthmus.testing.null import sample

T = TypeVar("T")
MODEL = "tiny"
NULL: dict[str, Any] = {"device": "null", "block_size": 16, "num_blocks": 512, "max_num_seqs": 64}
CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 16, "num_blocks": 64, "max_num_seqs": 32}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
VOCAB_SIZE = 384


def answer(seed: int, count: int) -> list[int]:
    """What the NULL platform gives to a request with this seed, by a formula that knows of no engine."""
    seeds = mix64(seed + torch.arange(1, count + 1) * GAMMA)
    return sample(torch.zeros(count, VOCAB_SIZE), None, None, None, None, seeds).tolist()


class HttpServer:
    """Ready when it is made. settings: of ServerSettings.  llm: of AsyncLLM."""

    def __init__(self, model: Path, *, settings: dict[str, Any] | None = None, **llm: Any) -> None:
        self._model, self._llm_settings = str(model), {"engine_process": "off", **llm}
        self._settings = ServerSettings(**{"served_model_names": (MODEL,), **(settings or {})})
        self._listener = bind("127.0.0.1", 0)
        self.url = url_of(self._listener, tls=self._settings.tls is not None)
        self._is_ready = threading.Event()
        self._failure: BaseException | None = None
        self.loop: asyncio.AbstractEventLoop
        self.context: ServerContext
        self._http: Any = None
        self._thread = threading.Thread(target=self._run, name="test-http-server")
        self._thread.start()
        self._is_ready.wait(60)
        if self._failure is not None:
            raise self._failure

    @property
    def llm(self) -> AsyncLLM:
        return self.context.llm

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def stats(self) -> EngineStats:
        return self.call(self.llm.stats())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No step of the engine runs within the block."""
        self.call(self.llm.pause())
        try:
            yield
        finally:
            self.call(self.llm.resume())

    def client(self, **settings: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **settings)

    def post(self, path: str, body: Any = None, **settings: Any) -> httpx.Response:
        """One request on a connection of its own. body: becomes JSON."""
        with self.client() as client:
            return client.post(path, json=body, **settings)

    def get(self, path: str, **settings: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **settings)

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """The answer's body; the request must succeed."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, without the [DONE] that must come last."""
        with self.client() as client, client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            return events_of(response.iter_lines())

    def openai(self, **settings: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **settings})

    def async_openai(self, **settings: Any) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **settings})

    def wait_until(self, condition: Callable[[], bool], seconds: float = 5) -> None:
        """Fails if it takes longer."""
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"not so within {seconds} s"
            time.sleep(0.01)

    def is_idle(self) -> bool:
        """Nobody is served, runs or waits, and every block is free."""
        stats = self.stats()
        now = stats.snapshot
        numbers = (now.num_running, now.num_waiting, now.num_swapped, *stats.num_used_blocks)
        return not any((*numbers, self.llm.num_unfinished, self.context.num_open))

    def close(self) -> None:
        if self._http is not None:
            self._http.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:
            self._failure = error
            self._is_ready.set()

    async def _live(self) -> None:
        self.loop = asyncio.get_running_loop()
        llm = AsyncLLM(self._model, **self._llm_settings)
        self.context = make_context(llm, self._settings)
        self._http = make_http(self.context)
        await llm.start()
        await self.context.learn()
        self._is_ready.set()
        await self._http.serve([self._listener])
        await llm.shutdown(0)


@contextmanager
def serving(model: Path, **settings: Any) -> Iterator[HttpServer]:
    """A server for the block, idle at its end."""
    server = HttpServer(model, **settings)
    try:
        yield server
        server.wait_until(server.is_idle)
    finally:
        server.close()


def events_of(lines: Iterator[str]) -> list[dict[str, Any]]:
    """The JSON of server-sent events."""
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data.pop() == "[DONE]"
    return [json.loads(each) for each in data]


async def async_events(lines: AsyncIterator[str]) -> list[dict[str, Any]]:
    return events_of(iter([line async for line in lines]))


def choices_of(events: Sequence[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """What a stream says of one choice."""
    return [choice for event in events for choice in event["choices"] if choice["index"] == index]


def text_of(events: Sequence[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a stream, of either route."""
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for choice in choices_of(events, index)
    )


def ids_of(events: Sequence[dict[str, Any]], index: int = 0) -> list[int]:
    """The token ids of one choice of a stream that was asked for them."""
    return [token_id for choice in choices_of(events, index) for token_id in choice.get("token_ids", ())]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of an answer with this status, which has OpenAI's form and no stack trace."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    assert "Traceback" not in response.text
    assert response.headers["x-request-id"]
    return error
