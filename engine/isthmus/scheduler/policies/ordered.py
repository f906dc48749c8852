"""A queue in the order of a claim that is fixed when a request arrives. Base of `priority` and `sjf`.

Ageing needs no clock: if every waiting request gains one unit of claim a second, they all gain alike, and their order
is that of a number known at arrival. So nothing has to be sorted again, two requests never change places, and the
longest wait can be written down: who comes more than the difference of two claims later, in seconds, is behind.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import islice
from operator import attrgetter

from sortedcontainers import SortedDict

from isthmus.config import SchedulerConfig
from isthmus.plugins.policy import SchedulingPolicy
from isthmus.scheduler.request import Request


class OrderedPolicy(SchedulingPolicy):
    """Lowest claim first; the victim is the running request with the highest."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._queue: SortedDict = SortedDict()
        self._num_arrivals = 0

    @abstractmethod
    def claim_of(self, request: Request) -> float:
        """In seconds, lower goes first. Asked once, when the request arrives."""

    def add(self, request: Request) -> None:
        self._num_arrivals += 1
        request.claim = (self.claim_of(request), self._num_arrivals)
        self._queue[request.claim] = request

    def add_preempted(self, request: Request) -> None:
        """Its claim is that of its arrival, which puts it before everyone of its class who came later."""
        if request.claim is None:
            self.add(request)
            return
        self._queue[request.claim] = request

    def head(self, count: int) -> Sequence[Request]:
        return list(islice(self._queue.values(), count))

    def remove(self, request: Request) -> None:
        del self._queue[request.claim]

    def choose_victim(self, running: Sequence[Request]) -> Request:
        return max(running, key=attrgetter("claim"))

    def __len__(self) -> int:
        return len(self._queue)
