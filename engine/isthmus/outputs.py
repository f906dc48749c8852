"""What the engine gives back for a request. Plain data: no tensors, picklable."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FinishReason(enum.StrEnum):
    """Why an output ended: a stop string or token, a length limit, the caller's abort, or a failure."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate at one position: natural log of its probability, its rank (1 = most likely), its own text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Candidates at one position by token id, most likely first. Never by text: different ids may decode alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Moments of a request, in seconds of the monotonic clock of the process that made them; None = not reached."""

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer so far.

    text: exactly the decoded `token_ids`, less the stop string or stop token unless it was asked for.
    cumulative_logprob: sum over `token_ids`; None unless logprobs were asked for.
    logprobs: one entry for each of `token_ids`; None unless asked for.
    stop_reason: the stop string or stop token id that ended it; None for the model's own end of sequence.
    score: of a sequence that beam search found, what they are ordered by; None otherwise.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The state of a request at one moment.

    prompt: None if the prompt was given as token ids.
    prompt_logprobs: one entry for each prompt token, None for the first; None unless asked for.
    num_cached_tokens: prompt tokens whose KV came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
