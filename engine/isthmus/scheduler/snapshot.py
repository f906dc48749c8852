"""The scheduler as it is after a step, for those who look on."""

from __future__ import annotations

from isthmus.scheduler.admission import Refusal
from isthmus.scheduler.kv_cache_manager import KVCacheManager
from isthmus.scheduler.places import Places
from isthmus.scheduler.stats import SchedulerSnapshot


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
