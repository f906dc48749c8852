"""How a request queues: what its caller says to the scheduler beside what it says to the sampler."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.errors import InvalidParamsError

_LIMIT = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingParams:
    """priority: lower goes first, with `scheduler.policy=priority`.  tenant: who is served, with
    `scheduler.policy=fair`.  is_system: may take the blocks of `scheduler.reserved_blocks`; not for users to set.

    Raises InvalidParamsError.
    """

    priority: int = 0
    tenant: str = ""
    is_system: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.priority, bool) or not isinstance(self.priority, int) or not abs(self.priority) < _LIMIT:
            raise InvalidParamsError(f"priority={self.priority!r}: must be an integer of 32 bits, lower goes first")
        if not isinstance(self.tenant, str):
            raise InvalidParamsError(f"tenant={self.tenant!r}: must be text")


DEFAULT_SCHEDULING = SchedulingParams()
