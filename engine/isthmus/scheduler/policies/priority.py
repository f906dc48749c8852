"""Lower `priority` first, then arrival; a stronger waiting request drives weaker running ones out."""

from __future__ import annotations

from typing import ClassVar

from isthmus.config import SchedulerConfig
from isthmus.scheduler.policies.ordered import OrderedPolicy
from isthmus.scheduler.request import Request


class PriorityPolicy(OrderedPolicy):
    """One level of priority is worth `priority_ageing_s` seconds of waiting, so the least of them is served too: a
    request of level p is passed by those of level q < p only that arrive within (p - q) * priority_ageing_s after it.
    """

    preempts: ClassVar[bool] = True

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._ageing_s: float = config.priority_ageing_s
        self._hysteresis_s: float = config.priority_hysteresis_s

    def claim_of(self, request: Request) -> float:
        return request.arrival_s + request.priority * self._ageing_s

    def outranks(self, waiting: Request, running: Request) -> bool:
        """Of a stronger class, and by more than the hysteresis. Claims never change, so no two can take turns."""
        return waiting.priority < running.priority and waiting.claim[0] + self._hysteresis_s < running.claim[0]
