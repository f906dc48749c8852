"""The door of the queue: how many may wait, and what to tell those who may not."""

from __future__ import annotations

from isthmus.config import AUTO, SchedulerConfig
from isthmus.errors import InvalidParamsError, InvalidPromptError, QueueFullError
from isthmus.scheduler.request import Request

SHORTEST_RETRY_S = 0.1
LONGEST_RETRY_S = 60.0
SMOOTHING = 0.1
"""Weight of the newest interval in the running mean of the intervals between admissions."""


class QueueLimits:
    """Counts the requests that wait for their first admission. One that was admitted once never counts again: it is
    work that has begun, and its place is bounded by `max_num_seqs`.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._max_reqs: int | None = None if config.max_num_queued_reqs is AUTO else config.max_num_queued_reqs
        self._max_tokens: int | None = config.max_num_queued_tokens
        self.num_reqs = 0
        self.num_tokens = 0
        self._last_admission_s: float | None = None
        self._interval_s: float | None = None

    def check(self, request: Request) -> None:
        """Raises QueueFullError if the queue has no room for it."""
        problem = None
        if self._max_reqs is not None and self.num_reqs >= self._max_reqs:
            problem = f"{self.num_reqs} requests wait, scheduler.max_num_queued_reqs is {self._max_reqs}"
        elif self._max_tokens is not None and self.num_tokens + request.num_prompt_tokens > self._max_tokens:
            problem = (
                f"{self.num_tokens} prompt tokens wait and this request has {request.num_prompt_tokens}, "
                f"scheduler.max_num_queued_tokens is {self._max_tokens}"
            )
        if problem is not None:
            retry_after_s = self._retry_after_s()
            raise QueueFullError(
                f"the queue is full: {problem}; try again in {retry_after_s:.1f} s", retry_after_s=retry_after_s
            )

    def check_alone(self, request: Request) -> None:
        """Raises InvalidParamsError or InvalidPromptError for a prompt whose completions not even the empty queue has
        room for. To try again would not help.
        """
        n = request.params.n
        num_tokens = n * request.num_prompt_tokens
        if self._max_reqs is not None and n > self._max_reqs:
            raise InvalidParamsError(
                f"SamplingParams.n={n}: each completion waits as a request, and scheduler.max_num_queued_reqs is "
                f"{self._max_reqs}; ask for fewer, or raise it"
            )
        if self._max_tokens is not None and num_tokens > self._max_tokens:
            raise InvalidPromptError(
                f"the prompt has {request.num_prompt_tokens} tokens, for {n} completions, and "
                f"scheduler.max_num_queued_tokens is {self._max_tokens}; shorten the prompt, or raise it"
            )

    def entered(self, request: Request) -> None:
        """A new request waits."""
        self.num_reqs += 1
        self.num_tokens += request.num_prompt_tokens

    def left(self, request: Request) -> None:
        """It waits no longer, for whatever reason."""
        self.num_reqs -= 1
        self.num_tokens -= request.num_prompt_tokens

    def admitted(self, now_s: float) -> None:
        """Keeps the mean interval between admissions."""
        if self._last_admission_s is not None:
            interval = now_s - self._last_admission_s
            mean = interval if self._interval_s is None else self._interval_s
            self._interval_s = mean + SMOOTHING * (interval - mean)
        self._last_admission_s = now_s

    def _retry_after_s(self) -> float:
        """Until a place is likely to be free: the mean interval between admissions."""
        wait = 1.0 if self._interval_s is None else self._interval_s
        return min(max(wait, SHORTEST_RETRY_S), LONGEST_RETRY_S)
