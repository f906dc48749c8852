"""What crosses between scheduler and worker. Plain data, picklable, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from isthmus.outputs import FinishReason
from isthmus.pooling_params import PoolingParams
from isthmus.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

RawLogprobs = dict[int, tuple[float, int]]
"""Candidates at one position: token id -> (log-probability, rank from 1), most likely first"""


@dataclass(frozen=True, slots=True)
class BlockOps:
    """(source, destination) block ids. The worker does swap_out, then swap_in, then copy, then the forward: in this
    order a block that was freed this step may be handed out again in it.
    """

    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    copy: tuple[tuple[int, int], ...] = ()


NO_BLOCK_OPS = BlockOps()


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """Everything about a request that the worker does not hold: a new one, or one that comes back after preemption.

    token_ids: prompt and outputs so far.  block_ids: the whole table of the first block group.  window_block_ids: the
    tables of the others, 0 where the window has moved on.  pooling: None = sample.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    bad_words_ids: tuple[tuple[int, ...], ...]
    window_block_ids: tuple[list[int], ...] = ()
    pooling: PoolingParams | None = None


@dataclass(frozen=True, slots=True)
class CachedRequestData:
    """The delta of the requests that the worker holds.

    num_computed_tokens runs parallel to req_ids; new_block_ids has an entry only where the table grew, and
    new_window_block_ids beside it for the other block groups.  last_token_ids: of beams, to take the place of what the
    worker has as their last token, which is one that it sampled itself.
    """

    req_ids: list[str] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    new_window_block_ids: dict[str, tuple[list[int], ...]] = field(default_factory=dict)
    last_token_ids: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. `num_scheduled_tokens` is in batch order: first the cached requests, then the new ones. `block_ops` has
    an entry a block group. `token_masks`: request id -> [W] int32, a bit a token, 1 = allowed; no entry = all are.
    """

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    block_ops: tuple[BlockOps, ...]
    finished_req_ids: list[str]
    preempted_req_ids: list[str]
    token_masks: dict[str, npt.NDArray[np.int32]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """Results in the batch order of `SchedulerOutput.num_scheduled_tokens`.

    sampled_token_ids: [] for a request whose prompt is not finished.  logprobs: request id -> one entry a sampled
    token.  prompt_logprobs: request id -> (position of the first entry, entries).  invalid_req_ids: requests whose
    masks left no token to choose.  pooled: request id -> the vector of its prompt, not normalised.
    """

    sampled_token_ids: list[list[int]]
    logprobs: dict[str, list[RawLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[int, list[RawLogprobs]]] = field(default_factory=dict)
    invalid_req_ids: frozenset[str] = frozenset()
    pooled: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Usable blocks of the layers that see `window` tokens; None = all of a sequence."""

    num_blocks: int
    num_host_blocks: int = 0
    window: int | None = None


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the workers found at start: usable blocks that they can hold, and how fast they are; the least of all ranks.

    groups: one a block group; the first is the one that settings speak of.  prefill_tokens_per_s, block_copies_per_s:
    measured at start; None = not measured.
    """

    groups: tuple[GroupLimits, ...]
    prefill_tokens_per_s: float | None = None
    block_copies_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class BeamSequence:
    """An output that beam search found. logprob: the sum over its tokens.  score: that, with the length penalty.
    stop_reason: as in RequestDelta.
    """

    token_ids: list[int]
    logprob: float
    score: float
    finish_reason: FinishReason
    stop_reason: int | None = None


@dataclass(slots=True)
class RequestDelta:
    """What a step did for one request, on its way to the front end. beams: what a beam search found, at its end.
    admitted_s: when the request was admitted for the first time.  pooled: as in ModelRunnerOutput.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    logprobs: list[RawLogprobs] | None = None
    prompt_logprobs: tuple[int, list[RawLogprobs]] | None = None
    beams: list[BeamSequence] | None = None
    admitted_s: float | None = None
    pooled: list[float] | None = None
