"""What the engine gives back for a request. Plain data: no tensors, picklable."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from isthmus.errors import RequestError


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
    admitted_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def queue_time_s(self) -> float | None:
        """From arrival to first admission, not less than 0."""
        return None if self.admitted_s is None else max(self.admitted_s - self.arrival_s, 0.0)

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
    embedding: the prompt's vector, of a request for that (PoolingParams); its only output has no tokens.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    embedding: list[float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """A prompt as one vector. prompt, num_cached_tokens, metrics: as in RequestOutput."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float]
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> EmbeddingOutput:
        """Of a finished request for an embedding. Raises RequestError if it ended without one."""
        if output.embedding is None:
            [ended] = output.outputs
            why = ended.stop_reason or "it was aborted"
            raise RequestError(f"request {output.request_id!r} has no embedding: {why}")
        return cls(
            request_id=output.request_id,
            prompt=output.prompt,
            prompt_token_ids=output.prompt_token_ids,
            embedding=output.embedding,
            num_cached_tokens=output.num_cached_tokens,
            metrics=output.metrics,
        )
