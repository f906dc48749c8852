"""One measured run against a server that is there already."""

from __future__ import annotations

import asyncio
import itertools
import math
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
import uvloop

from isthmus.bench.serving.arrivals import Kind, Ramp, arrival_times
from isthmus.bench.serving.driver import drive
from isthmus.bench.serving.endpoint import Backend, BenchRequest, Endpoint
from isthmus.bench.serving.http_client import HttpClient, HttpError
from isthmus.bench.serving.timeline import Timeline
from isthmus.errors import EngineDeadError

T = TypeVar("T")
POLL_S = 0.2
"""Between two attempts to reach a server that is not ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """model: None takes the first that the server names.  path: in the place of the backend's.  insecure: certificates
    are not checked.  extra: fields of every body.
    """

    base_url: str
    backend: Backend = "openai"
    model: str | None = None
    path: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    insecure: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """rate: requests a second, math.inf = all at once.  duration_s: after it nothing is sent any more.  num_warmups:
    requests before, one by one, that are not measured.
    """

    rate: float | Ramp = math.inf
    arrivals: Kind = "poisson"
    burstiness: float = 1.0
    max_concurrency: int | None = None
    duration_s: float = math.inf
    num_warmups: int = 0
    seed: int = 0


def measure(
    target: Target, requests: Sequence[BenchRequest], plan: LoadPlan, *, patience_s: float
) -> tuple[str, list[Timeline]]:
    """(the model, what happened to each request that was sent). patience_s: what the server may take to be ready.

    Raises EngineDeadError if it does not get ready.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(target, requests, plan, patience_s))


async def _measure(
    target: Target, requests: Sequence[BenchRequest], plan: LoadPlan, patience_s: float
) -> tuple[str, list[Timeline]]:
    client = HttpClient(target.base_url, headers=target.headers, tls=_unchecked() if target.insecure else None)
    try:
        named = await first_model(client, target.base_url, patience_s)
        model = named if target.model is None else target.model
        endpoint = Endpoint(client, target.backend, model, path=target.path, extra=target.extra)
        await wait_until_ready(endpoint, requests[0], target.base_url, patience_s)
        for request in itertools.islice(itertools.cycle(requests), plan.num_warmups):
            await endpoint.send(request)
        return model, await drive(
            endpoint.send,
            requests,
            _arrivals(len(requests), plan),
            max_concurrency=plan.max_concurrency,
            duration_s=plan.duration_s,
        )
    finally:
        client.close()


def _arrivals(count: int, plan: LoadPlan) -> Iterable[float] | None:
    if plan.rate == math.inf:
        return None
    return arrival_times(count, plan.rate, kind=plan.arrivals, burstiness=plan.burstiness, seed=plan.seed)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def first_model(client: HttpClient, base_url: str, patience_s: float) -> str:
    """The first model that the server names, as soon as it does. Raises EngineDeadError after `patience_s`."""

    async def name() -> str:
        status, body = await client.get("/v1/models")
        if status != 200:
            raise HttpError(f"status {status}: {body.decode(errors='replace')[:200]}")
        return msgspec.json.decode(body, type=_Models).data[0].id

    return await _in_time(name, base_url, "named no model", patience_s)


async def wait_until_ready(endpoint: Endpoint, request: BenchRequest, base_url: str, patience_s: float) -> None:
    """Returns when the request, cut down to one token, is answered: a server may name its model long before.

    Raises EngineDeadError after `patience_s`.
    """

    async def ask() -> None:
        timeline = await endpoint.send(replace(request, max_tokens=1))
        if timeline.error is not None:
            raise HttpError(timeline.error)

    await _in_time(ask, base_url, "answered no request", patience_s)


async def _in_time(attempt: Callable[[], Awaitable[T]], base_url: str, what: str, patience_s: float) -> T:
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return await attempt()
        except (HttpError, OSError, msgspec.MsgspecError, IndexError) as error:
            if time.monotonic() >= until_s:
                raise EngineDeadError(
                    f"{base_url}: the server {what} within {patience_s:g} s ({error}); start it, or correct --base-url"
                ) from error
        await asyncio.sleep(POLL_S)


def _unchecked() -> ssl.SSLContext:
    """For servers with a certificate of their own making."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
