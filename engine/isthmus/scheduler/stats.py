"""What the scheduler counts. Totals never decrease; the rest is the state after the last schedule()."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start.

    Prefix statistics count tokens, once for each first admission that may read the cache. num_preempted_tokens: tokens
    whose KV was thrown away and must be computed again. queue_time_s: summed from arrival to first admission.
    num_refused: attempts to queue a request that found the queue full; whoever tries again counts again.

    num_lost_blocks: cached blocks of the first group that were handed out again, of which num_unused_lost_blocks were
    never found by a later request.  lost_block_lifetime_s, lost_block_idle_s: summed over them, from when the block was
    filled, and from when the last request let it go.
    """

    num_steps: int = 0
    num_scheduled_tokens: int = 0
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
