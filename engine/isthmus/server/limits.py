"""How large a body may be, and how long it may take to come."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isthmus.server.asgi import header_of
from isthmus.server.errors import ApiError, error_response


class BodyLimit:
    """ASGI middleware: reads the body before anything is done with it. 413 if it is too large, 408 if it is late."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        try:
            self._check(int(header_of(scope, b"content-length") or 0))
            async with asyncio.timeout(self._timeout_s):
                body = await self._read(receive)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        except TimeoutError:
            late = ApiError(408, f"the body did not come within {self._timeout_s:g} s; send it faster", code="timeout")
            await error_response(late)(scope, receive, send)
            return
        if body is None:
            return
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; None if the client has gone."""
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            num_bytes += len(parts[-1])
            self._check(num_bytes)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise ApiError(
                413,
                f"the body has {num_bytes} bytes or more, this server takes {self._max_bytes}; send less, or raise "
                "--max-body-bytes",
                code="body_too_large",
                headers={"connection": "close"},
            )
