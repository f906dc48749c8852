"""`/health`, `/ping`, `/version`, `/load` and `/metrics`: for machines that watch over machines."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from fastapi import FastAPI
from starlette.responses import JSONResponse, PlainTextResponse, Response

from isthmus import __version__
from isthmus.engine.supervisor import EngineState
from isthmus.server.context import Context, ServerContext
from isthmus.server.metrics import CONTENT_TYPE
from isthmus.server.protocol.other import Health, Load, Version

Status = Literal["starting", "ready", "stopping", "dead"]
_STATUS: Mapping[EngineState, Status] = MappingProxyType(
    {
        EngineState.NEW: "starting",
        EngineState.STARTING: "starting",
        EngineState.READY: "ready",
        EngineState.STOPPING: "stopping",
        EngineState.STOPPED: "stopping",
        EngineState.DEAD: "dead",
    }
)
"""What the states are called here."""
_NOT_READY: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "no requests are taken"}}


def add_routes(api: FastAPI) -> None:
    """Add the routes of this file."""
    api.get("/health", response_model=Health, responses=_NOT_READY)(health)
    api.get("/ping", response_model=Health, responses=_NOT_READY)(ping)
    api.post("/ping", response_model=Health, responses=_NOT_READY)(ping)
    api.get("/version")(version)
    api.get("/load")(load)
    api.get("/metrics", response_class=PlainTextResponse)(metrics)


async def health(context: Context) -> Response:
    """200 if requests are taken, 503 with the reason if not."""
    return _health(context)


async def ping(context: Context) -> Response:
    """The same, under the name that SageMaker asks for."""
    return _health(context)


async def version() -> Version:
    """Of isthmus."""
    return Version(version=__version__)


async def load(context: Context) -> Load:
    """How much there is to do."""
    return Load(server_load=context.num_open)


async def metrics(context: Context) -> Response:
    """Everything that is counted, in Prometheus' text format."""
    return Response(await context.metrics.exposition(context.llm), media_type=CONTENT_TYPE)


def _health(context: ServerContext) -> Response:
    llm = context.llm
    status = _STATUS[llm.state]
    body = Health(status=status, stage=llm.stage, num_restarts=llm.num_restarts)
    return JSONResponse(body.model_dump(), 200 if status == "ready" else 503)
