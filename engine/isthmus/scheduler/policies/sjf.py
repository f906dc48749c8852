"""Shortest prefill first, with ageing."""

from __future__ import annotations

from isthmus.config import SchedulerConfig
from isthmus.scheduler.policies.ordered import OrderedPolicy
from isthmus.scheduler.request import Request


class ShortestFirstPolicy(OrderedPolicy):
    """A prompt of n tokens queues as if it had come n / `sjf_ageing_tokens_per_s` seconds later: nobody who arrives
    later than that passes it.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._tokens_per_s: float = config.sjf_ageing_tokens_per_s

    def claim_of(self, request: Request) -> float:
        return request.arrival_s + request.num_prompt_tokens / self._tokens_per_s
