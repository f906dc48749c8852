"""Requests that come, and are given up, while others run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus import LLM, RequestOutput
from isthmus.conformance.solo import Request

MAX_STEPS = 2000


@dataclass(frozen=True, slots=True)
class Arrival:
    """Comes before step `step`; is given up before step `abort`, if that is not None and it still runs."""

    request: Request
    step: int
    abort: int | None = None


def play(llm: LLM, arrivals: Sequence[Arrival]) -> list[RequestOutput]:
    """Step until all have come and gone, the scheduler's books checked after each step; their last outputs in order.

    Raises AssertionError if that takes more than MAX_STEPS.
    """
    frontend = llm._frontend
    last: dict[str, RequestOutput] = {}
    coming = max(arrival.step for arrival in arrivals)
    step = 0
    while frontend.has_unfinished or step <= coming:
        for index, arrival in enumerate(arrivals):
            if arrival.step == step:
                frontend.add_request(str(index), *arrival.request)
            if arrival.abort == step:
                last |= {output.request_id: output for output in frontend.abort([str(index)])}
        last |= {output.request_id: output for output in frontend.step()}
        llm._core.scheduler.check_integrity()
        step += 1
        assert step < MAX_STEPS, f"after {step} steps these still run: {sorted(llm._core.scheduler.requests)}"
    return [last[str(index)] for index in range(len(arrivals))]
