"""First come, first served; the last admitted is the victim."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from isthmus.config import SchedulerConfig
from isthmus.plugins.policy import SchedulingPolicy
from isthmus.scheduler.request import Request


class FcfsPolicy(SchedulingPolicy):
    """One queue; victims return to its front."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._queue: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._queue[request.request_id] = request

    def add_preempted(self, request: Request) -> None:
        self._queue[request.request_id] = request
        self._queue.move_to_end(request.request_id, last=False)

    def head(self, count: int) -> Sequence[Request]:
        return list(islice(self._queue.values(), count))

    def remove(self, request: Request) -> None:
        del self._queue[request.request_id]

    def choose_victim(self, running: Sequence[Request]) -> Request:
        return running[-1]

    def __len__(self) -> int:
        return len(self._queue)
