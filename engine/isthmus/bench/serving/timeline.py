"""What happened to one request, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Times in seconds of one monotonic clock.

    sent_s: after the wait for its turn, if there was one.  event_s: of each event that brought something of the answer.
    ended_s: when all had come.  num_prompt_tokens, num_output_tokens: as the server counts them.  error: None if the
    answer came whole.  token_ids: of the answer, if they were asked for.
    """

    sent_s: float
    ended_s: float
    event_s: Sequence[float] = ()
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None
    token_ids: Sequence[int] = ()

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.event_s[0] - self.sent_s if self.event_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for fewer than two tokens."""
        if self.num_output_tokens < 2 or not self.event_s:
            return None
        return (self.event_s[-1] - self.event_s[0]) / (self.num_output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: the gaps between events. One event may hold several tokens."""
        return [later - earlier for earlier, later in pairwise(self.event_s)]

    @property
    def e2el_s(self) -> float | None:
        """End-to-end latency: until the last event that brought something."""
        return self.event_s[-1] - self.sent_s if self.event_s else None
