"""The ASGI application: routes within middlewares."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from isthmus import __version__
from isthmus.async_llm import AsyncLLM
from isthmus.errors import IsthmusError
from isthmus.server import chat, completions, console, embeddings, health, models, responses, tokens
from isthmus.server.auth import Auth
from isthmus.server.context import ServerContext
from isthmus.server.departure import ClientGone
from isthmus.server.errors import error_response
from isthmus.server.limits import BodyLimit
from isthmus.server.metrics import Metrics
from isthmus.server.protocol.common import ErrorBody
from isthmus.server.request_log import RequestLog
from isthmus.server.settings import ServerSettings
from isthmus.server.tracing import open_tracing

ROUTES = (
    completions.add_routes,
    chat.add_routes,
    responses.add_routes,
    embeddings.add_routes,
    models.add_routes,
    tokens.add_routes,
    health.add_routes,
)
"""One a file. A new route is a new file and an entry here."""
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "the request is wrong"},
    401: {"description": "no API key, or a wrong one"},
    404: {"description": "no such model or path"},
    408: {"description": "the body came too slowly"},
    413: {"description": "the body is too large"},
    429: {"description": "the queue is full; Retry-After says when to try again"},
    500: {"description": "the server failed"},
    503: {"description": "the engine is starting, stopping or dead"},
    504: {"description": "the time limit is over"},
}


def make_app(context: ServerContext) -> ASGIApp:
    """Everything between a connection and the engine, outermost last."""
    settings = context.settings
    app: ASGIApp = make_api(context)
    app = BodyLimit(app, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)
    if settings.api_keys:
        app = Auth(app, settings.api_keys)
    if settings.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return RequestLog(app)


def make_context(llm: AsyncLLM, settings: ServerSettings) -> ServerContext:
    """Of a server that has not begun."""
    tracing = None if settings.otlp_endpoint is None else open_tracing(settings.otlp_endpoint, settings.model_name)
    return ServerContext(llm, settings, Metrics(settings.metrics_prefix, settings.model_name), tracing=tracing)


def make_api(context: ServerContext) -> FastAPI:
    """The routes. Their documentation pages are off, as these load scripts from elsewhere; /openapi.json is there."""
    api = _Api(
        title="Isthmus",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses={status: {"model": ErrorBody, **described} for status, described in ERRORS.items()},
    )
    api.state.context = context
    for add_routes in ROUTES:
        add_routes(api)
    if context.settings.console:
        console.add_routes(api)
    for kind in (IsthmusError, HTTPException, RequestValidationError, ClientGone, TimeoutError, Exception):
        api.add_exception_handler(kind, _answer)
    return api


class _Api(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """Without the 422 that FastAPI documents and this server never answers."""
        schema = super().openapi()
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        return schema


async def _answer(request: Request, error: Exception) -> Response:
    return error_response(error)
