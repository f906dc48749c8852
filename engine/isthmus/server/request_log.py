"""One line of log for each request, and the id that its answer and all its lines have."""

from __future__ import annotations

import logging
import re
import time
import uuid
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from isthmus.server.asgi import header_of, notes_of, state_of
from isthmus.server.errors import error_response
from isthmus.server.origin import ORIGIN, origin_of

logger = logging.getLogger(__name__)

REQUEST_ID: ContextVar[str | None] = ContextVar("isthmus_request_id", default=None)
"""Of the request that is being served."""
_ACCEPTABLE_ID = re.compile(r"[!-~]{1,128}")
_QUIET_PATHS = frozenset({"/health", "/ping", "/load", "/metrics", "/console/state"})
"""Asked for every few seconds by machines."""


class RequestLog:
    """ASGI middleware, the outermost: gives the request its id, and answers 500 for what nobody caught.

    A client may choose the id by the header x-request-id; the engine never uses it, so it need not be unique.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        start_s, status = time.monotonic(), 0
        request_id = chosen_id(header_of(scope, b"x-request-id"))
        state_of(scope)["request_id"] = request_id
        REQUEST_ID.set(request_id)
        ORIGIN.set(origin_of(scope, request_id))
        header = (b"x-request-id", request_id.encode())

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            # With a status, the API has answered already, and logged why.
            if not status:
                await error_response(error)(scope, receive, send_with_id)
        finally:
            level = logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO
            fields = {"status": status, "duration_s": round(time.monotonic() - start_s, 4), **notes_of(scope)}
            logger.log(level, "%s %s", scope["method"], scope["path"], extra={"fields": fields})


def chosen_id(header: str | None) -> str:
    """The client's id if it can stand in a header and in a line; a new one otherwise."""
    return header if header is not None and _ACCEPTABLE_ID.fullmatch(header) else uuid.uuid4().hex
