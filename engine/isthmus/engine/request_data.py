"""A request on its way to an engine core that lives elsewhere: plain fields, in which nothing refers to anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import msgspec

from isthmus.pooling_params import PoolingParams
from isthmus.sampling_params import BeamSearchParams, SamplingParams
from isthmus.scheduler.beam import BeamGroup
from isthmus.scheduler.request import Request
from isthmus.scheduling_params import SchedulingParams
from isthmus.structured.spec import StructuredOutput


class RequestData(msgspec.Struct, frozen=True, array_like=True):
    """What makes a Request.

    params, beams, pooling: the fields that differ from their defaults, of SamplingParams, BeamSearchParams and
    PoolingParams.
    siblings: (request id, seed) of further requests that differ in nothing else.
    """

    request_id: str
    token_ids: list[int]
    params: dict[str, Any]
    beams: dict[str, Any] | None
    pooling: dict[str, Any] | None
    eos_token_ids: list[int]
    bad_words_ids: list[list[int]]
    seed: int
    arrival_s: float
    priority: int
    tenant: str
    is_system: bool
    cache_keys: dict[str, str]
    siblings: list[tuple[str, int]]


def pack(requests: Sequence[Request]) -> RequestData:
    """One new request, or those of one prompt, the leader first."""
    leader, *others = requests
    return RequestData(
        request_id=leader.request_id,
        token_ids=leader.token_ids,
        params=_sampling_fields(leader.params),
        beams=None if leader.beams is None else _changed(leader.beams.params),
        pooling=None if leader.pooling is None else _changed(leader.pooling),
        eos_token_ids=sorted(leader.eos_token_ids),
        bad_words_ids=[list(ids) for ids in leader.bad_words_ids],
        seed=leader.seed,
        arrival_s=leader.arrival_s,
        priority=leader.priority,
        tenant=leader.tenant,
        is_system=leader.is_system,
        cache_keys=leader.cache_keys,
        siblings=[(other.request_id, other.seed) for other in others],
    )


def unpack(data: RequestData) -> list[Request]:
    """The requests that were packed."""
    leader = Request(
        data.request_id,
        data.token_ids,
        _sampling_params(data.params),
        eos_token_ids=data.eos_token_ids,
        bad_words_ids=data.bad_words_ids,
        seed=data.seed,
        arrival_s=data.arrival_s,
        scheduling=SchedulingParams(priority=data.priority, tenant=data.tenant, is_system=data.is_system),
        cache_keys=data.cache_keys,
        pooling=None if data.pooling is None else PoolingParams(**data.pooling),
    )
    if data.beams is not None:
        leader.beams = BeamGroup(BeamSearchParams(**data.beams), leader)
    return [leader, *(leader.sibling(request_id, seed) for request_id, seed in data.siblings)]


def _sampling_fields(params: SamplingParams) -> dict[str, Any]:
    changed = _changed(params)
    if params.structured is not None:
        changed["structured"] = _changed(params.structured)
    return changed


def _sampling_params(changed: dict[str, Any]) -> SamplingParams:
    structured = changed.get("structured")
    if structured is None:
        return SamplingParams(**changed)
    return SamplingParams(**{**changed, "structured": StructuredOutput(**structured)})


def _changed(params: SamplingParams | BeamSearchParams | PoolingParams | StructuredOutput) -> dict[str, Any]:
    values = ((item, getattr(params, item.name)) for item in fields(params))
    return {item.name: value for item, value in values if value is not item.default and value != item.default}
