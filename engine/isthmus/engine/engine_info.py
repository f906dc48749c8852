"""What an engine tells of itself: once when it is ready, and whenever it is asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from isthmus.config import EngineConfig
from isthmus.scheduler.stats import LiveRequest, SchedulerSnapshot, SchedulerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts that do not change while it runs. num_blocks: usable blocks, one entry a block group. Memory in bytes, as
    measured at start: weights and activations (0 = not measured), and what the KV pool was given.
    """

    platform: str
    device: str
    vocab_size: int
    hidden_size: int
    num_blocks: list[int]
    block_size: int
    weights_bytes: int
    activations_bytes: int
    kv_pool_bytes: int


@dataclass(frozen=True, slots=True)
class Started:
    """A ready engine: its resolved configuration and its facts."""

    config: EngineConfig
    info: EngineInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A moment between two steps. num_used_blocks: those that requests hold, one entry a block group.  requests: some
    of those that live, if they were asked for.
    """

    scheduler: SchedulerStats
    snapshot: SchedulerSnapshot
    num_used_blocks: list[int]
    num_blocks: list[int]
    is_paused: bool
    requests: list[LiveRequest] = field(default_factory=list)
