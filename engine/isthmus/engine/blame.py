"""Whose fault a failed step was: its requests are run again in halves, until those that fail on their own are found."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from isthmus.engine.rewind import put_back, take_all
from isthmus.errors import EngineDeadError
from isthmus.outputs import FinishReason
from isthmus.sampling_params import SamplingParams
from isthmus.scheduler.output import RequestDelta
from isthmus.scheduler.request import Request
from isthmus.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

MAX_UNEXPLAINED = 3
"""So many failures for which nobody could be blamed, within UNEXPLAINED_S, are the engine's own."""
UNEXPLAINED_S = 60.0
PROBE_ID = "isthmus: does the engine still run?"


class StepFailed(Exception):
    """A step that the executor could not do. request_ids: whom it was for."""

    def __init__(self, error: Exception, request_ids: Collection[str]) -> None:
        super().__init__(str(error))
        self.error = error
        self.request_ids = request_ids


class Blame:
    """advance: one step, whose deltas it appends to a list; raises StepFailed.  give_up_steps: forget what is under
    way.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        advance: Callable[[list[RequestDelta]], None],
        give_up_steps: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._advance = advance
        self._give_up_steps = give_up_steps
        self._unexplained: deque[float] = deque(maxlen=MAX_UNEXPLAINED)

    def find(self, failed: StepFailed, deltas: list[RequestDelta]) -> None:
        """End the requests that make a step fail, with FinishReason.ERROR, and leave all others queued to go on from
        the tokens that they have. What the requests got meanwhile is appended to `deltas`.

        Raises EngineDeadError if the failure is nobody's: nothing was to be computed, not even one token can be
        computed now, or it happens time and again to different company.
        """
        logger.error("a step failed; looking for the request that makes it fail", exc_info=failed.error)
        if not failed.request_ids:
            raise EngineDeadError(f"a step for nobody failed: {_named(failed.error)}") from failed.error
        suspected = {self._owner_of(request_id) for request_id in failed.request_ids}
        everyone = self._take_all()
        suspects = [one for one in everyone if one.request_id in suspected]
        cleared, num_guilty = self._try_in_parts(suspects, deltas)
        if num_guilty and not cleared:
            self._probe()
        if not num_guilty:
            self._note_unexplained(failed.error)
        for request in (*cleared, *(one for one in everyone if one not in suspects)):
            put_back(self._scheduler, request)

    def _try_in_parts(self, suspects: Sequence[Request], deltas: list[RequestDelta]) -> tuple[list[Request], int]:
        """The suspects that can go on, as they are now, and how many cannot."""
        cleared: list[Request] = []
        num_guilty = 0
        parts = deque(_halves(suspects))
        while parts:
            part = parts.popleft()
            error = self._try(part, deltas)
            remaining = self._take_all()
            if error is None:
                cleared += remaining
            elif len(part) == 1:
                num_guilty += 1
                deltas.append(_ended_by(part[0], error))
            else:
                parts.extendleft(reversed(_halves(remaining)))
        return cleared, num_guilty

    def _try(self, part: Sequence[Request], deltas: list[RequestDelta]) -> Exception | None:
        """Run these requests alone until each has got a token; what prevents that."""
        for request in part:
            put_back(self._scheduler, request)
        missing = {request.request_id for request in part}
        while missing and self._scheduler.has_unfinished:
            new: list[RequestDelta] = []
            try:
                self._advance(new)
            except StepFailed as failed:
                return failed.error
            finally:
                deltas += new
            missing -= {one.request_id for one in new if one.new_token_ids or one.finish_reason is not None}
        return None

    def _probe(self) -> None:
        """Raises EngineDeadError if the engine cannot compute a single token for anybody."""
        probe = Request(PROBE_ID, [0], SamplingParams(temperature=0, max_tokens=1))
        error = self._try([probe], [])
        if error is not None:
            raise EngineDeadError(f"no request can be computed any more: {_named(error)}") from error

    def _note_unexplained(self, error: Exception) -> None:
        now_s = time.monotonic()
        self._unexplained.append(now_s)
        if len(self._unexplained) == MAX_UNEXPLAINED and now_s - self._unexplained[0] < UNEXPLAINED_S:
            raise EngineDeadError(
                f"{MAX_UNEXPLAINED} steps failed within {UNEXPLAINED_S:.0f} s, and not because of a request; "
                f"the last: {_named(error)}"
            ) from error

    def _owner_of(self, request_id: str) -> str:
        """A beam is blamed as the search that it belongs to."""
        request = self._scheduler.requests.get(request_id)
        return request_id if request is None or request.beams is None else request.beams.group_id

    def _take_all(self) -> list[Request]:
        self._give_up_steps()
        return take_all(self._scheduler)


def _halves(requests: Sequence[Request]) -> list[Sequence[Request]]:
    middle = (len(requests) + 1) // 2
    return [part for part in (requests[:middle], requests[middle:]) if part]


def _ended_by(request: Request, error: Exception) -> RequestDelta:
    message = f"the model cannot compute this request: {_named(error)}"
    logger.error("request %r: %s", request.request_id, message)
    return RequestDelta(
        request.request_id,
        [],
        FinishReason.ERROR,
        message,
        num_cached_tokens=max(request.num_cached_tokens, 0),
    )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
