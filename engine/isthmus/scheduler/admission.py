"""When a waiting request may come in, blocks apart: holding back, prefill slots, and who may pass whom for how long."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from isthmus.config import SchedulerConfig
from isthmus.scheduler.request import Request


class Refusal(enum.Enum):
    """Why a waiting request was not admitted in a step."""

    CAPACITY = "capacity"
    """Too few free blocks."""
    SEATS = "seats"
    """max_num_seqs requests run."""
    SLOTS = "slots"
    """As many prompts as allowed are computed in parts."""
    HELD = "held"
    """The batching window, or the prefill delay."""
    IN_FLIGHT = "in flight"
    """A step under way will give it a token."""
    BUDGET = "budget"
    """The step's tokens were used up."""


@dataclass(slots=True)
class _Blocked:
    """Since when, and how many passed."""

    since_s: float
    num_passed: int = 0


class AdmissionGate:
    """State between the steps.

    `_blocked`: waiting requests that were refused for capacity at the head of the queue; they stay in it when others
    become the head, or two that take turns could be passed for ever. Invariant: `_partial` holds exactly the running
    requests whose known tokens were not all scheduled yet, with whether they are long.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._long_tokens: int = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self._partial: dict[str, bool] = {}
        self._blocked: dict[str, _Blocked] = {}
        self._woken_s = 0.0
        self._prompt_step_s = 0.0

    def woken(self, now_s: float) -> None:
        """The first request came to an idle engine."""
        self._woken_s = now_s

    def prompt_step_took(self, seconds: float) -> None:
        """Duration of the last step that computed prompt tokens."""
        self._prompt_step_s = seconds

    def holds(self, head: Request, now_s: float, *, idle: bool) -> bool:
        """Whether all of the queue waits for company. Nobody that was admitted before is held back."""
        if head.num_cached_tokens >= 0:
            return False
        if idle:
            return self.held_until_s(now_s) is not None
        return now_s - head.arrival_s < self._config.prefill_delay_factor * self._prompt_step_s

    def held_until_s(self, now_s: float) -> float | None:
        """End of the batching window, if it has not passed."""
        end = self._woken_s + self._config.batching_window_ms / 1e3
        return end if now_s < end else None

    def has_slot(self, num_left: int, *, leaving: Iterable[Request] = ()) -> bool:
        """Whether one more prompt, with `num_left` tokens to compute, may come in parts once `leaving` are gone."""
        gone = {request.request_id for request in leaving}
        partial = [is_long for request_id, is_long in self._partial.items() if request_id not in gone]
        if len(partial) >= self._config.max_num_partial_prefills:
            return False
        return num_left <= self._long_tokens or sum(partial) < self._config.max_long_partial_prefills

    def prefill_began(self, request: Request, num_left: int) -> None:
        """The first part of its prompt, of `num_left` tokens, is scheduled."""
        self._partial[request.request_id] = num_left > self._long_tokens

    def prefill_ended(self, request: Request) -> None:
        """The last part is scheduled."""
        self._partial.pop(request.request_id, None)

    def forget(self, request: Request) -> None:
        """It runs no longer, or has ended."""
        self._partial.pop(request.request_id, None)
        self._blocked.pop(request.request_id, None)

    def admitted(self, request: Request) -> None:
        """It came in; a head that was blocked is blocked no longer."""
        self._blocked.pop(request.request_id, None)

    @property
    def num_partial(self) -> int:
        """Running requests whose prompt is computed in parts."""
        return len(self._partial)

    def blocked(self, head: Request, now_s: float) -> None:
        """The head of the queue does not fit."""
        self._blocked.setdefault(head.request_id, _Blocked(now_s))

    def may_pass(self, head: Request, now_s: float) -> bool:
        """Whether one more request may pass the blocked head; if not, freed blocks gather for it."""
        blocked = self._blocked[head.request_id]
        return (
            blocked.num_passed < self._config.max_overtaking
            and now_s - blocked.since_s <= self._config.max_overtaking_s
        )

    def passed(self, head: Request) -> None:
        """A request was admitted before the head."""
        if head.request_id in self._blocked:
            self._blocked[head.request_id].num_passed += 1
