"""How a front end talks to an engine core: the same calls whether it lives here or in another process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from isthmus.scheduler.output import RequestDelta
from isthmus.scheduler.request import Request

if TYPE_CHECKING:
    from isthmus.engine.core import EngineCore  # a front end whose engine is elsewhere starts without it


class EngineClient(ABC):
    """The core's calls, as seen from the front end."""

    @abstractmethod
    def check_request(self, request: Request) -> None:
        """Raises RequestError for a request that could never run, or never wait. Nothing is queued."""

    @abstractmethod
    def add_requests(self, requests: Sequence[Request]) -> None:
        """Queue one request, or those of one prompt, the leader first; all or none."""

    @abstractmethod
    def abort_requests(self, request_ids: Iterable[str]) -> None: ...

    @abstractmethod
    def get_output(self) -> list[RequestDelta]:
        """What the next step did; waits for it."""

    @property
    @abstractmethod
    def has_unfinished(self) -> bool: ...

    @abstractmethod
    def shutdown(self) -> None: ...


class InprocClient(EngineClient):
    """The core in this very process; each get_output() is one step."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core

    def check_request(self, request: Request) -> None:
        self.core.check_request(request)

    def add_requests(self, requests: Sequence[Request]) -> None:
        self.core.add_requests(requests)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self.core.abort_requests(request_ids)

    def get_output(self) -> list[RequestDelta]:
        return self.core.step()

    @property
    def has_unfinished(self) -> bool:
        return self.core.has_unfinished

    def shutdown(self) -> None:
        self.core.shutdown()
