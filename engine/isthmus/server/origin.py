"""Where a request comes from: what its traces and its place in the console need to know of the HTTP side."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from starlette.types import Scope

from isthmus.server.asgi import header_of


@dataclass(frozen=True, slots=True)
class Origin:
    """request_id: that of the answer's header.  path: of the route.  traceparent, tracestate: W3C trace context that
    the client sent, as it stood there; None = none.
    """

    request_id: str = ""
    path: str = ""
    traceparent: str | None = None
    tracestate: str | None = None


NOWHERE = Origin()
ORIGIN: ContextVar[Origin] = ContextVar("isthmus_origin", default=NOWHERE)
"""Of the request that is being served."""


def origin_of(scope: Scope, request_id: str) -> Origin:
    """From a request's headers."""
    traceparent, tracestate = header_of(scope, b"traceparent"), header_of(scope, b"tracestate")
    return Origin(request_id, scope["path"], traceparent, tracestate)
