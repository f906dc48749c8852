"""Order of the waiting queue and choice of the victim. A policy is a small object; the scheduler asks it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

from isthmus.scheduler.request import Request


class SchedulingPolicy(ABC):
    """Holds the waiting requests."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """A new request."""

    @abstractmethod
    def add_preempted(self, request: Request) -> None:
        """A victim comes back; it must not lose its place to those that arrived later."""

    @abstractmethod
    def peek(self) -> Request:
        """The next to admit. The queue must not be empty."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Admitted or aborted. O(1)."""

    @abstractmethod
    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Who of `running`, in admission order, gives up its blocks."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]: ...


class FcfsPolicy(SchedulingPolicy):
    """First come, first served; the last admitted is the victim."""

    def __init__(self) -> None:
        self._queue: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._queue[request.request_id] = request

    def add_preempted(self, request: Request) -> None:
        self._queue[request.request_id] = request
        self._queue.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        return next(iter(self._queue.values()))

    def remove(self, request: Request) -> None:
        del self._queue[request.request_id]

    def choose_victim(self, running: Sequence[Request]) -> Request:
        return running[-1]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue.values())


POLICIES: Mapping[str, Callable[[], SchedulingPolicy]] = {"fcfs": FcfsPolicy}
