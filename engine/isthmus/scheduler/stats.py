"""What the scheduler counts. Totals never decrease; the rest is the state after the last schedule()."""

from __future__ import annotations

from dataclasses import dataclass, field

NUM_STEP_SIZES = 18
"""The last is for all that have more than 2**16 tokens."""


def step_size(num_tokens: int) -> int:
    """The entry of `step_sizes` for a step of so many tokens."""
    return min(max(num_tokens - 1, 0).bit_length(), NUM_STEP_SIZES - 1)


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start.

    Prefix statistics count tokens, once for each first admission that may read the cache. num_preempted_tokens: tokens
    whose KV was thrown away and must be computed again. queue_time_s: summed from arrival to first admission.
    num_refused: attempts to queue a request that found the queue full; whoever tries again counts again.
    step_sizes: steps by their number of tokens; entry i counts those of at most 2**i that are not in an entry before.

    num_lost_blocks: cached blocks of the first group that were handed out again, of which num_unused_lost_blocks were
    never found by a later request.  lost_block_lifetime_s, lost_block_idle_s: summed over them, from when the block was
    filled, and from when the last request let it go.  num_reused_blocks: blocks that were found when nobody held them;
    reused_block_gap_s: summed over them, from when the last request let them go.
    """

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    step_sizes: list[int] = field(default_factory=lambda: [0] * NUM_STEP_SIZES)
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_admitted: int = 0
    num_refused: int = 0
    queue_time_s: float = 0.0
    num_preemptions: int = 0
    num_swap_preemptions: int = 0
    num_preempted_tokens: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    host_prefix_hits: int = 0
    num_lost_blocks: int = 0
    num_unused_lost_blocks: int = 0
    lost_block_lifetime_s: float = 0.0
    lost_block_idle_s: float = 0.0
    num_reused_blocks: int = 0
    reused_block_gap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """The queues and the cache after the last step.

    waiting_by_reason: reason of the head-most refusal -> waiting requests it holds back ("capacity", "seats", "policy",
    "held").  kv_usage, host_usage: shares of the blocks in use, in [0, 1].
    """

    num_running: int
    num_waiting: int
    num_swapped: int
    waiting_by_reason: dict[str, int] = field(default_factory=dict)
    kv_usage: float = 0.0
    host_usage: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRequest:
    """A request as it is between two steps. status: of RequestStatus.  waits_for: why it was refused in the last step,
    "" = it was not looked at, or does not wait.  max_tokens: prompt and outputs, at most.  Moments are those of the
    scheduler's clock.
    """

    request_id: str
    status: str
    waits_for: str
    tenant: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_blocks: int
    num_preemptions: int
    arrival_s: float
    admitted_s: float | None


@dataclass(frozen=True, slots=True)
class Shortage:
    """In blocks: what admitting a request takes, what is free, and what of that is not for it: reserved for system
    requests, or kept back by the watermark.
    """

    num_needed: int
    num_free: int
    num_reserved: int = 0
    num_watermark: int = 0

    @property
    def is_real(self) -> bool:
        return self.num_needed > self.num_free - self.num_reserved - self.num_watermark
