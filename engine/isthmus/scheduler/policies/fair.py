"""Equal service for tenants: the one that was served least goes first.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): every tenant has a
counter of the tokens computed for it, divided by its weight; admission takes the tenant with the lowest. One that had
nothing waiting is lifted to the lowest of those that have, so that idleness earns no credit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import ClassVar

from sortedcontainers import SortedSet

from isthmus.config import SchedulerConfig
from isthmus.errors import ConfigError
from isthmus.plugins.policy import SchedulingPolicy
from isthmus.scheduler.request import Request

KEPT_COUNTERS = 1024
"""Counters of tenants without a queue that are kept before any is forgotten."""


class FairPolicy(SchedulingPolicy):
    """First come, first served within a tenant; the victim is the last admitted of the tenant that was served most.

    Invariant: `_order` has (counter, tenant) for exactly the tenants that have somebody waiting.
    """

    charges: ClassVar[bool] = True

    def __init__(self, config: SchedulerConfig) -> None:
        self._weights = {tenant: _weight(tenant, text) for tenant, text in config.tenant_weights}
        self._counters: dict[str, float] = {}
        self._served: Collection[str] = ()
        """Tenants that the last step had tokens of."""
        self._queues: dict[str, OrderedDict[str, Request]] = {}
        self._order: SortedSet = SortedSet()
        self._floor = 0.0
        self._num_waiting = 0

    def add(self, request: Request) -> None:
        self._put(request, front=False)

    def add_preempted(self, request: Request) -> None:
        self._put(request, front=True)

    def _put(self, request: Request, *, front: bool) -> None:
        tenant = request.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = OrderedDict()
            lowest = self._order[0][0] if self._order else self._floor
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), lowest)
            self._order.add((self._counters[tenant], tenant))
        queue[request.request_id] = request
        if front:
            queue.move_to_end(request.request_id, last=False)
        self._num_waiting += 1

    def head(self, count: int) -> Sequence[Request]:
        return list(islice(self._in_order(), count))

    def _in_order(self) -> Iterator[Request]:
        for _, tenant in self._order:
            yield from self._queues[tenant].values()

    def remove(self, request: Request) -> None:
        tenant = request.tenant
        queue = self._queues[tenant]
        del queue[request.request_id]
        self._num_waiting -= 1
        if not queue:
            del self._queues[tenant]
            self._order.remove((self._counters[tenant], tenant))
            self._floor = max(self._floor, self._counters[tenant])
            self._forget_idle_tenants()

    def _forget_idle_tenants(self) -> None:
        """Counters that the next arrival would lift anyway are not worth keeping; done when they are many."""
        if len(self._counters) > 2 * len(self._queues) + KEPT_COUNTERS:
            lowest = self._order[0][0] if self._order else self._floor
            self._counters = {
                tenant: counter
                for tenant, counter in self._counters.items()
                if tenant in self._queues or counter > lowest or tenant in self._served
            }

    def choose_victim(self, running: Sequence[Request]) -> Request:
        counters = self._counters
        place = max(range(len(running)), key=lambda index: (counters.get(running[index].tenant, 0.0), index))
        return running[place]

    def charge(self, scheduled: Iterable[tuple[Request, int]]) -> None:
        totals: dict[str, int] = {}
        for request, num_tokens in scheduled:
            totals[request.tenant] = totals.get(request.tenant, 0) + num_tokens
        self._served = totals.keys()
        for tenant, num_tokens in totals.items():
            before = self._counters.get(tenant, 0.0)
            self._counters[tenant] = before + num_tokens / self._weights.get(tenant, 1.0)
            if tenant in self._queues:
                self._order.remove((before, tenant))
                self._order.add((self._counters[tenant], tenant))

    def __len__(self) -> int:
        return self._num_waiting


def _weight(tenant: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight < float("inf"):
        raise ConfigError([f"scheduler.tenant_weights={tenant}={text}: is no weight; give a positive number"])
    return weight
