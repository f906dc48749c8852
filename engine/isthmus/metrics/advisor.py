"""What the counters say about the settings: pure functions of samples, each with the numbers that it rests on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.scheduler.stats import SchedulerSnapshot, SchedulerStats

LEAST_ADMISSIONS = 20
"""Fewer say nothing about a workload."""
LOW_HIT_RATE = 0.1
MANY_PREEMPTIONS = 0.05
"""Preemptions for each admission."""
PINNED_SHARE = 0.5
"""Of the samples, in which as many run as may."""
GROWTH = 1.5
LEAST_GROWTH = 8
"""Requests by which a queue must grow to count as growing, beside the factor."""
LOW_KV_USAGE = 0.25
FULL_STEP = 0.9
"""Share of the token budget from which on a step counts as full."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The scheduler at one time."""

    time_s: float
    stats: SchedulerStats
    snapshot: SchedulerSnapshot


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings that advice is about."""

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """topic: one word or two.  text: what to do.  evidence: name -> number."""

    topic: str
    text: str
    evidence: Mapping[str, float]


def advise(samples: Sequence[Sample], limits: Limits) -> list[Advice]:
    """What to change, from two or more samples in order; nothing if they say too little."""
    if len(samples) < 2:
        return []
    found = (rule(samples, limits) for rule in _RULES)
    return [advice for advice in found if advice is not None]


def _prefix_hits(samples: Sequence[Sample], limits: Limits) -> Advice | None:
    queries = _rise(samples, lambda stats: stats.prefix_cache_queries)
    admitted = _rise(samples, lambda stats: stats.num_admitted)
    if not limits.enable_prefix_caching or not queries or admitted < LEAST_ADMISSIONS:
        return None
    rate = _rise(samples, lambda stats: stats.prefix_cache_hits) / queries
    if rate >= LOW_HIT_RATE:
        return None
    return Advice(
        "prefix cache",
        "few prompt tokens are found in the prefix cache: send requests with a common beginning close together, and "
        "put what they share first",
        {"hit_rate": rate, "queried_tokens": queries},
    )


def _preemptions(samples: Sequence[Sample], limits: Limits) -> Advice | None:
    preemptions = _rise(samples, lambda stats: stats.num_preemptions)
    admitted = _rise(samples, lambda stats: stats.num_admitted)
    if admitted < LEAST_ADMISSIONS or preemptions < MANY_PREEMPTIONS * admitted:
        return None
    computed = _rise(samples, lambda stats: stats.num_scheduled_tokens)
    lost = _rise(samples, lambda stats: stats.num_preempted_tokens)
    return Advice(
        "preemptions",
        "requests drive each other out of the KV cache: lower scheduler.max_num_seqs, or give the cache more memory "
        "(cache.memory_fraction)",
        {"preemptions": preemptions, "per_admission": preemptions / admitted, "lost_share": lost / max(computed, 1)},
    )


def _pinned(samples: Sequence[Sample], limits: Limits) -> Advice | None:
    seated = [sample.snapshot.waiting_by_reason.get("seats", 0) for sample in samples]
    full = [sample.snapshot.num_running >= limits.max_num_seqs for sample in samples]
    share = sum(map(bool, seated)) / len(samples)
    if share < PINNED_SHARE or sum(full) / len(samples) < PINNED_SHARE:
        return None
    return Advice(
        "seats",
        "as many requests run as may, while others wait for a seat: raise scheduler.max_num_seqs",
        {
            "max_num_seqs": limits.max_num_seqs,
            "share_of_samples": share,
            "most_waiting_for_a_seat": max(seated),
            "kv_usage": _mean([sample.snapshot.kv_usage for sample in samples]),
        },
    )


def _growing_queue(samples: Sequence[Sample], limits: Limits) -> Advice | None:
    third = max(len(samples) // 3, 1)
    before = _mean([sample.snapshot.num_waiting for sample in samples[:third]])
    after = _mean([sample.snapshot.num_waiting for sample in samples[-third:]])
    if after < GROWTH * before or after < before + LEAST_GROWTH:
        return None
    steps = _rise(samples, lambda stats: stats.num_steps)
    fill = _rise(samples, lambda stats: stats.num_scheduled_tokens) / max(steps, 1) / limits.max_num_batched_tokens
    remedy = (
        "raise scheduler.max_num_batched_tokens, or add a replica"
        if fill >= FULL_STEP
        else "add a replica; the steps are not full, so a larger token budget would not help"
    )
    return Advice(
        "queue", f"the queue grows: {remedy}", {"waiting_before": before, "waiting_after": after, "budget_used": fill}
    )


def _idle(samples: Sequence[Sample], limits: Limits) -> Advice | None:
    admitted = _rise(samples, lambda stats: stats.num_admitted)
    most_waiting = max(sample.snapshot.num_waiting + sample.snapshot.num_swapped for sample in samples)
    most_used = max(sample.snapshot.kv_usage for sample in samples)
    if admitted < LEAST_ADMISSIONS or most_waiting or most_used >= LOW_KV_USAGE:
        return None
    return Advice(
        "capacity",
        "nobody ever waits and most of the KV cache is free: the engine is larger than its load; more traffic, fewer "
        "replicas or less memory would do",
        {"most_kv_usage": most_used, "admitted": admitted},
    )


_RULES: tuple[Callable[[Sequence[Sample], Limits], Advice | None], ...] = (
    _prefix_hits,
    _preemptions,
    _pinned,
    _growing_queue,
    _idle,
)


def _rise(samples: Sequence[Sample], total: Callable[[SchedulerStats], int]) -> int:
    """By how much a total grew from the first sample to the last."""
    return total(samples[-1].stats) - total(samples[0].stats)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
