"""Taking requests off a scheduler whose state cannot be trusted, and putting them back to be computed again."""

from __future__ import annotations

from isthmus.scheduler.beam import BeamGroup
from isthmus.scheduler.request import Request
from isthmus.scheduler.scheduler import Scheduler
from isthmus.scheduling_params import SchedulingParams


def take_all(scheduler: Scheduler) -> list[Request]:
    """All live requests, anew: with the tokens that they have, without anything computed. Those that had begun come
    first, otherwise in their old order. The scheduler is left empty and trusts no block.

    A beam search begins again: nothing of it has been told to anybody, and it finds the same.
    """
    found: dict[str, Request] = {}
    for request in scheduler.requests.values():
        if request.beams is None:
            found[request.request_id] = _anew(request)
        else:
            found.setdefault(request.beams.group_id, _search_anew(request, request.beams))
    scheduler.abort_all()
    return sorted(found.values(), key=lambda request: request.num_cached_tokens < 0)


def put_back(scheduler: Scheduler, request: Request) -> None:
    """Queue a request of `take_all`. One that had begun is as one that was preempted: it does not count as queued."""
    num_cached_tokens, request.num_cached_tokens = request.num_cached_tokens, -1
    scheduler.add_request(request)
    if num_cached_tokens >= 0:
        scheduler.queue.left(request)
        request.num_cached_tokens = num_cached_tokens


def _anew(request: Request) -> Request:
    other = Request(
        request.request_id,
        request.token_ids,
        request.params,
        eos_token_ids=tuple(request.eos_token_ids),
        bad_words_ids=request.bad_words_ids,
        seed=request.seed,
        arrival_s=request.arrival_s,
        scheduling=SchedulingParams(priority=request.priority, tenant=request.tenant, is_system=request.is_system),
        cache_keys=request.cache_keys,
        pooling=request.pooling,
    )
    other.num_prompt_tokens = request.num_prompt_tokens
    other.num_cached_tokens = request.num_cached_tokens
    other.admitted_s = request.admitted_s
    other.num_preemptions = request.num_preemptions
    other.grammar = request.grammar
    return other


def _search_anew(beam: Request, group: BeamGroup) -> Request:
    first = _anew(beam)
    first.request_id = group.group_id
    first.token_ids = beam.token_ids[: beam.num_prompt_tokens]
    first.beams = BeamGroup(group.params, first)
    return first
