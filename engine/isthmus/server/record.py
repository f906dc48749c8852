"""What is known of a prompt's way through the engine once that is over."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.outputs import FinishReason
from isthmus.sampling_params import BeamSearchParams, SamplingParams
from isthmus.server.origin import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """request_id: the engine's.  finish_reasons: one a completion.  error: what ended it, if not the model.  Moments
    are in seconds of the monotonic clock; None = not reached.
    """

    request_id: str
    origin: Origin
    tenant: str
    params: SamplingParams | BeamSearchParams
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reasons: tuple[FinishReason, ...]
    error: str | None
    arrival_s: float
    admitted_s: float | None
    first_token_s: float | None
    finished_s: float

    @property
    def queue_time_s(self) -> float:
        """Until it was admitted, or given up."""
        end_s = self.finished_s if self.admitted_s is None else self.admitted_s
        return max(end_s - self.arrival_s, 0.0)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, of completions of equal length."""
        num_steps = self.num_output_tokens / max(len(self.finish_reasons), 1) - 1
        if self.first_token_s is None or num_steps <= 0:
            return None
        return (self.finished_s - self.first_token_s) / num_steps
