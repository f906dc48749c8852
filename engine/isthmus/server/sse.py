"""Server-sent events: an answer that comes in pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, ClassVar

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from isthmus.server.departure import ClientGone, WhileConnected
from isthmus.server.errors import api_error

DONE = b"data: [DONE]\n\n"
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "the answer, or with `stream` its events",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}
"""For the description of a route that gives both."""
GOODBYE_S = 5.0
"""For the end of a stream that failed, should the client not be reading."""


def event(payload: BaseModel) -> bytes:
    """One event."""
    return b"data: %b\n\n" % payload.model_dump_json().encode()


class EventStream(Response):
    """Sends what `events` gives, then `last`; an error on the way becomes an event of its own before that.

    work: is entered before the first event and left after the last, or when the client goes.
    """

    media_type = "text/event-stream"
    last: ClassVar[bytes] = DONE

    def __init__(self, events: AsyncGenerator[bytes, None], work: AbstractAsyncContextManager[Any]) -> None:
        # What the base class does beside is about a body that is known.
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with WhileConnected(receive):
                await self._send_all(send)
        except ClientGone:
            return

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with self._work, aclosing(self._events) as events:
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:  # whatever it is, it is the answer: the status has gone out already
            async with asyncio.timeout(GOODBYE_S):
                await send({"type": "http.response.body", "body": self.failure(error), "more_body": True})
                await self._end(send)
            return
        await self._end(send)

    async def _end(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": self.last, "more_body": False})

    def failure(self, error: Exception) -> bytes:
        """The event that an error becomes."""
        return f"data: {json.dumps(api_error(error).body())}\n\n".encode()
