"""The step's masks: which tokens the requests with a grammar may get."""

from __future__ import annotations

import logging

from isthmus.outputs import FinishReason
from isthmus.scheduler.output import RequestDelta, SchedulerOutput
from isthmus.scheduler.request import Request
from isthmus.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


def add_masks(scheduler: Scheduler, output: SchedulerOutput) -> list[RequestDelta]:
    """Write the masks into the step just scheduled. A request that can get no further token ends: its last delta.

    A request with a grammar is never scheduled while a token of it is unknown, so all of its output is here, and the
    one placeholder that it may have is the token that this step samples.
    """
    ended = []
    for request_id, request in list(scheduler.structured.items()):
        if not request.num_placeholders or request_id not in output.num_scheduled_tokens:
            continue
        assert request.grammar is not None
        request.grammar.accept(request.token_ids, request.num_prompt_tokens)
        words = request.grammar.mask(may_end=bool(request.eos_token_ids))
        if words is not None:
            output.token_masks[request_id] = words
            continue
        delta = _last(request, request.grammar.error)
        ended.append(delta)
        scheduler.end_request(request, delta.finish_reason or FinishReason.STOP)
    return ended


def _last(request: Request, error: str | None) -> RequestDelta:
    delta = RequestDelta(
        request.request_id,
        [],
        FinishReason.STOP,
        num_cached_tokens=max(request.num_cached_tokens, 0),
        admitted_s=request.admitted_s,
    )
    if error is not None:
        delta.finish_reason = FinishReason.ERROR
        delta.stop_reason = (
            f"the output cannot be continued as SamplingParams.structured asks for: {error}; make the grammar simpler"
        )
        logger.error("request %r: %s", request.request_id, delta.stop_reason)
    return delta
