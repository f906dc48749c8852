"""All lines of a batch through the routes of the server, so many at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx
from starlette.types import ASGIApp

from isthmus.async_llm import AsyncLLM
from isthmus.batch.lines import BatchLine
from isthmus.batch.results import BatchResult
from isthmus.engine.supervisor import EngineState
from isthmus.errors import EngineDeadError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
LONGEST_PAUSE_S = 5.0
"""Before a request that was refused for want of room is tried again."""
MAX_LONELY_TRIES = 5
"""Of a request that is refused though it is the only one: nothing will make room for it."""
_TOO_MANY, _UNAVAILABLE = 429, 503


class BatchRunner:
    """app: the server's application over `llm`.  on_result: is told of each line's result, in whatever order they come.

    What the server has no room for is tried again. So is what an engine took along that died, if another is started;
    if none is, EngineDeadError ends the run, and what was under way has no result.
    """

    def __init__(self, app: ASGIApp, llm: AsyncLLM, on_result: Callable[[BatchResult], None]) -> None:
        self._llm = llm
        self._on_result = on_result
        self._http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://batch", timeout=httpx.Timeout(None)
        )
        self._num_open = 0

    async def run(self, lines: Iterable[BatchLine], concurrency: int) -> None:
        """Returns when every line has a result."""
        waiting = iter(lines)
        async with self._http, asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(self._work(waiting))

    async def _work(self, waiting: Iterator[BatchLine]) -> None:
        for line in waiting:
            self._on_result(unusable(line) or await self._answer(line))

    async def _answer(self, line: BatchLine) -> BatchResult:
        content = json.dumps(line.body)
        num_tries = 0
        self._num_open += 1
        try:
            while True:
                response = await self._http.post(
                    line.url, content=content, headers={"content-type": "application/json"}
                )
                num_tries = num_tries + 1 if self._num_open == 1 else 0
                if not self._may_try_again(response, num_tries):
                    return _result(line, response)
                await asyncio.sleep(min(float(response.headers.get("retry-after", 1)), LONGEST_PAUSE_S))
        finally:
            self._num_open -= 1

    def _may_try_again(self, response: httpx.Response, num_tries: int) -> bool:
        if response.status_code == _TOO_MANY:
            return num_tries < MAX_LONELY_TRIES
        if response.status_code == _UNAVAILABLE and self._llm.state in (EngineState.DEAD, EngineState.STOPPED):
            raise EngineDeadError(response.json()["error"]["message"])
        return response.status_code == _UNAVAILABLE


def unusable(line: BatchLine) -> BatchResult | None:
    """The result of a line that is no request of a batch."""
    if line.method != "POST":
        return _refused(line, "invalid_method", f"method {line.method!r}: must be 'POST'")
    if line.url not in URLS:
        return _refused(line, "invalid_url", f"url {line.url!r}: must be one of {', '.join(URLS)}")
    if not isinstance(line.body, dict):
        return _refused(line, "invalid_body", f"body of type {type(line.body).__name__}: must be a JSON object")
    if line.body.get("stream"):
        return _refused(line, "invalid_body", "body.stream: a batch has no streams; leave it out")
    return None


def _refused(line: BatchLine, code: str, message: str) -> BatchResult:
    return BatchResult(line.custom_id, code=code, message=message)


def _result(line: BatchLine, response: httpx.Response) -> BatchResult:
    body: Any = response.json()
    return BatchResult(line.custom_id, response.status_code, response.headers["x-request-id"], body)
