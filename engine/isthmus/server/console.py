"""The console: a page at `/` with a chat and a view of the engine at work, and what that view shows.

Nothing is gathered for it but the journal's short notes: the page asks once a second, while it is visible.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from isthmus import __version__
from isthmus.engine.engine_info import EngineStats
from isthmus.engine.supervisor import EngineState
from isthmus.errors import EngineDeadError
from isthmus.plugins.manager import PluginManager
from isthmus.scheduler.stats import LiveRequest
from isthmus.server.console_files import FOLDER, MEDIA_TYPES, PAGE, read
from isthmus.server.context import Context, ServerContext
from isthmus.server.record import RequestRecord

PATIENCE_S = 3.0
"""For the engine to answer between two steps; the page shows what it knows then."""
NUM_RECENT = 128
PERCENTILES = (50, 95, 99)
HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "content-security-policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
)
"""Nothing comes from elsewhere, nothing within the page's text can run, and no other page can frame it."""


def add_routes(api: FastAPI) -> None:
    """Add the routes of this file. They are no part of the API, so its description leaves them out."""
    console = Console()
    api.get("/", include_in_schema=False)(page)
    api.get(f"{FOLDER}state", include_in_schema=False)(console.state)
    for name in MEDIA_TYPES:
        if name != PAGE:
            api.get(f"{FOLDER}{name}", include_in_schema=False)(_file_route(name))


async def page() -> Response:
    """The console."""
    return _file(PAGE)


def _file_route(name: str) -> Any:
    async def file() -> Response:
        return _file(name)

    return file


def _file(name: str) -> Response:
    return Response(read(name), headers={**HEADERS, "content-type": MEDIA_TYPES[name]})


class Console:
    """Knows which platforms there are once somebody has looked: to find out may take a moment."""

    def __init__(self) -> None:
        self._platforms: asyncio.Task[list[dict[str, Any]]] | None = None

    async def state(self, context: Context) -> Response:
        """All that the page shows, as JSON. Times are seconds before now."""
        if self._platforms is None:
            self._platforms = asyncio.create_task(asyncio.to_thread(platforms))
        found = await state_of(context)
        if self._platforms.done():
            found["platforms"] = self._platforms.result()
        return Response(
            msgspec.json.encode(found), media_type="application/json", headers={"cache-control": "no-store"}
        )


def platforms() -> list[dict[str, Any]]:
    """What `isthmus platforms` says."""
    plugins = PluginManager.load()
    return [dataclasses.asdict(report) for report in plugins.probe_all()]


async def state_of(context: ServerContext) -> dict[str, Any]:
    """Everything but the platforms."""
    llm = context.llm
    stats = await _stats(context)
    now_s = time.monotonic()
    ended = context.journal.ended
    return {
        "version": __version__,
        "model": context.settings.model_name,
        "status": "ready" if context.is_ready else _status(llm.state),
        "stage": llm.stage,
        "num_restarts": llm.num_restarts,
        "uptime_s": time.time() - context.created_s,
        "num_open": context.num_open,
        "engine": _engine(context) if context.is_ready else None,
        "now": None if stats is None else dataclasses.asdict(stats.snapshot),
        "is_paused": stats is not None and stats.is_paused,
        "num_used_blocks": None if stats is None else stats.num_used_blocks,
        "totals": None if stats is None else dataclasses.asdict(stats.scheduler),
        "live": [] if stats is None else [_live(context, request, now_s) for request in stats.requests],
        "recent": [_recent(record, now_s) for record in ended[-NUM_RECENT:]],
        "latency": latency(ended),
    }


async def _stats(context: ServerContext) -> EngineStats | None:
    """None if there is no engine, or none that answers."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await context.llm.stats(requests=True)
    except (EngineDeadError, TimeoutError):
        return None


def _status(state: EngineState) -> str:
    if state is EngineState.DEAD:
        return "dead"
    return "stopping" if state in (EngineState.STOPPING, EngineState.STOPPED) else "starting"


def _engine(context: ServerContext) -> dict[str, Any]:
    """What does not change while it runs."""
    config, info = context.llm.config, context.llm.info
    return {
        **dataclasses.asdict(info),
        "model": config.model.model,
        "dtype": str(config.model.dtype),
        "max_model_len": context.llm.limits.max_model_len,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "policy": config.scheduler.policy,
        "enable_prefix_caching": config.cache.enable_prefix_caching,
    }


def _live(context: ServerContext, request: LiveRequest, now_s: float) -> dict[str, Any]:
    origin = context.journal.open.get(request.request_id.partition("#")[0])
    return {
        "id": request.request_id,
        "http_id": None if origin is None else origin.request_id,
        "path": None if origin is None else origin.path,
        "tenant": request.tenant,
        "status": request.status,
        "waits_for": request.waits_for,
        "prompt_tokens": request.num_prompt_tokens,
        "cached_tokens": request.num_cached_tokens,
        "computed_tokens": request.num_computed_tokens,
        "output_tokens": request.num_output_tokens,
        "max_tokens": request.max_tokens,
        "blocks": request.num_blocks,
        "preemptions": request.num_preemptions,
        "arrived": now_s - request.arrival_s,
        "admitted": _ago(request.admitted_s, now_s),
        "first_token": _ago(context.llm.first_token_s(request.request_id), now_s),
    }


def _recent(record: RequestRecord, now_s: float) -> dict[str, Any]:
    return {
        "id": record.request_id,
        "http_id": record.origin.request_id,
        "path": record.origin.path,
        "tenant": record.tenant,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "finish": ",".join(dict.fromkeys(reason.value for reason in record.finish_reasons)),
        "arrived": now_s - record.arrival_s,
        "admitted": _ago(record.admitted_s, now_s),
        "first_token": _ago(record.first_token_s, now_s),
        "ended": now_s - record.finished_s,
    }


def _ago(moment_s: float | None, now_s: float) -> float | None:
    return None if moment_s is None else now_s - moment_s


def latency(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Percentiles in seconds, over the requests that the journal keeps."""
    return {
        "num_requests": len(records),
        "ttft_s": _percentiles(record.ttft_s for record in records),
        "tpot_s": _percentiles(record.tpot_s for record in records),
        "queue_s": _percentiles(record.queue_time_s for record in records),
        "e2e_s": _percentiles(record.finished_s - record.arrival_s for record in records),
    }


def _percentiles(values: Iterable[float | None]) -> dict[str, float] | None:
    """The smallest value that so many per cent do not exceed (nearest rank); None if there is no value."""
    found = sorted(value for value in values if value is not None)
    if not found:
        return None
    return {f"p{share}": found[max(-(-len(found) * share // 100), 1) - 1] for share in PERCENTILES}
