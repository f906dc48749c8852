"""The scheduler as it is after a step, for those who look on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from isthmus.scheduler.admission import Refusal
from isthmus.scheduler.kv_cache_manager import KVCacheManager
from isthmus.scheduler.places import Places
from isthmus.scheduler.request import Request
from isthmus.scheduler.stats import LiveRequest, SchedulerSnapshot


def take_snapshot(places: Places, kv: KVCacheManager, waits: dict[str, Refusal]) -> SchedulerSnapshot:
    """waits: request id -> why it was refused in the last step, in the order in which they were looked at."""
    host = kv.host_pool
    return SchedulerSnapshot(
        num_running=len(places.running),
        num_waiting=len(places.waiting),
        num_swapped=len(places.swapped),
        waiting_by_reason=_waiting_by_reason(len(places.waiting), waits),
        kv_usage=kv.pool.num_used / kv.pool.num_blocks,
        host_usage=host.num_used / host.num_blocks if host is not None else 0.0,
    )


def live_requests(places: Places, waits: Mapping[str, Refusal], limit: int) -> list[LiveRequest]:
    """The first `limit` of those that run, were swapped out, or wait. waits: as for take_snapshot."""
    waiting = places.waiting.head(min(limit, len(places.waiting)))
    return [
        _live(request, waits.get(request.request_id))
        for request in itertools.islice(itertools.chain(places.running, places.swapped, waiting), limit)
    ]


def _live(request: Request, refusal: Refusal | None) -> LiveRequest:
    return LiveRequest(
        request_id=request.request_id,
        status=request.status.value,
        waits_for="" if refusal is None else refusal.value,
        tenant=request.tenant,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=max(request.num_cached_tokens, 0),
        num_computed_tokens=request.num_computed_tokens,
        num_output_tokens=request.num_output_tokens,
        max_tokens=request.max_total_tokens,
        num_blocks=len(request.block_ids),
        num_preemptions=request.num_preemptions,
        arrival_s=request.arrival_s,
        admitted_s=request.admitted_s,
    )


def _waiting_by_reason(num_waiting: int, waits: dict[str, Refusal]) -> dict[str, int]:
    """Who was not looked at waits for the one that was refused last."""
    if not num_waiting:
        return {}
    reasons = {reason.value: 0 for reason in Refusal}
    for refusal in waits.values():
        reasons[refusal.value] += 1
    last = next(reversed(waits.values()), Refusal.BUDGET)
    reasons[last.value] += max(num_waiting - len(waits), 0)
    return {reason: count for reason, count in reasons.items() if count}
