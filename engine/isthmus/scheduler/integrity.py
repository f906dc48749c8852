"""What must be true between two steps, checked the slow and obvious way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from isthmus.scheduler.beam import BeamGroup
from isthmus.scheduler.kv_cache_manager import KVCacheManager
from isthmus.scheduler.places import Places
from isthmus.scheduler.request import Request, RequestStatus
from isthmus.scheduler.waiting import QueueLimits


def check_integrity(
    requests: Mapping[str, Request],
    places: Places,
    beam_groups: Mapping[str, BeamGroup],
    limits: QueueLimits,
    kv: KVCacheManager,
    max_num_seqs: int,
) -> None:
    """Raises RuntimeError with the first broken invariant. O(requests + blocks)."""
    waiting = list(places.waiting)
    beams = [beam for group in beam_groups.values() for beam in group.requests]
    aside = [beam for beam in beams if beam.status is RequestStatus.HELD]
    held = [request for followers in places.followers.values() for request in followers] + aside
    ids = [request.request_id for request in (*waiting, *held, *places.swapped, *places.running)]
    if len(set(ids)) != len(ids) or set(ids) != set(requests):
        raise RuntimeError(f"queues hold {sorted(ids)}, live requests are {sorted(requests)}")
    if len(places.running) > max_num_seqs:
        raise RuntimeError(f"{len(places.running)} running requests, the cap is {max_num_seqs}")
    faults = chain(
        _running_faults(places.running, kv),
        _waiting_faults(waiting),
        _held_faults(held),
        _swapped_faults(places.swapped, kv),
        _count_faults([*waiting, *held], limits),
    )
    for fault in faults:
        raise RuntimeError(fault)
    if {beam.request_id for beam in beams} != {one.request_id for one in requests.values() if one.beams}:
        raise RuntimeError(f"beams are {beams}, live requests are {sorted(requests)}")
    kv.check_integrity(places.running, [*places.swapped, *(beam for beam in aside if beam.host_tables)])


def _running_faults(running: Iterable[Request], kv: KVCacheManager) -> Iterator[str]:
    for request in running:
        known = request.num_tokens + request.num_placeholders
        if request.status is not RequestStatus.RUNNING or not 0 < request.num_computed_tokens <= known:
            yield f"{request} is in `running`"
        if len(request.block_ids) < kv.num_blocks_for(request.num_computed_tokens):
            yield f"{request} has too few blocks for its computed tokens"


def _waiting_faults(waiting: Iterable[Request]) -> Iterator[str]:
    for request in waiting:
        if request.status is not RequestStatus.WAITING or request.block_ids or request.num_computed_tokens:
            yield f"{request} is in `waiting`"


def _held_faults(held: Iterable[Request]) -> Iterator[str]:
    for request in held:
        if request.status is not RequestStatus.HELD or request.block_ids:
            yield f"{request} is held by its group"


def _swapped_faults(swapped: Iterable[Request], kv: KVCacheManager) -> Iterator[str]:
    for request in swapped:
        num_held = len(request.host_tables[0])
        if request.status is not RequestStatus.SWAPPED or request.block_ids:
            yield f"{request} is in `swapped`"
        if num_held != kv.num_blocks_for(request.num_computed_tokens):
            yield f"{request} is in `swapped` with {num_held} host blocks"


def _count_faults(waiting: Iterable[Request], limits: QueueLimits) -> Iterator[str]:
    """Only those count that were never admitted."""
    queued = [request for request in waiting if request.num_cached_tokens < 0]
    tokens = sum(request.num_prompt_tokens for request in queued)
    if (limits.num_reqs, limits.num_tokens) != (len(queued), tokens):
        yield f"the queue counts {limits.num_reqs} requests and {limits.num_tokens} tokens"
