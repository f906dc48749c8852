"""A step while it is decided, and after it was handed out."""

from __future__ import annotations

from dataclasses import dataclass, field

from isthmus.scheduler.admission import Refusal
from isthmus.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from isthmus.scheduler.request import Request


@dataclass(slots=True)
class Step:
    """What schedule() has decided so far.

    budget: tokens that are left.  requests: in batch order, parallel to num_scheduled.  preempted: victims of this
    step.  waits: request id -> why it was refused.
    """

    budget: int
    now_s: float
    num_scheduled: dict[str, int] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    cached: CachedRequestData = field(default_factory=CachedRequestData)
    new: list[NewRequestData] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    waits: dict[str, Refusal] = field(default_factory=dict)
    num_decodes: int = 0


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was handed out and has not come back."""

    output: SchedulerOutput
    requests: list[Request]
    num_prefill_tokens: int
    num_tokens: int
    scheduled_s: float
