"""Named sets of values for a kind of traffic, each value with its reason.

A preset fills settings that are left to `auto`; what is given explicitly stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

CHAT, LONG_CONTEXT, MIXED = "chat", "long-context", "mixed"

_BATCHED_TOKENS = "scheduler.max_num_batched_tokens"
_SEQS = "scheduler.max_num_seqs"
_BLOCK_SIZE = "cache.block_size"
_LONG_PREFILL = "scheduler.long_prefill_token_threshold"
_LONG_PREFILLS = "scheduler.max_long_partial_prefills"
_QUEUED_REQS = "scheduler.max_num_queued_reqs"


@dataclass(frozen=True, slots=True)
class PresetValue:
    """What a preset proposes for one setting, and why."""

    value: int
    reason: str


PRESETS: Mapping[str, Mapping[str, PresetValue]] = MappingProxyType(
    {
        CHAT: {
            _BATCHED_TOKENS: PresetValue(8192, "the prompts of many users share a step with all running answers"),
            _SEQS: PresetValue(256, "a short conversation holds few blocks, so many run together"),
            _BLOCK_SIZE: PresetValue(32, "with many requests a step, larger blocks keep the block tables short"),
            _LONG_PREFILL: PresetValue(0, "short prompts need no splitting, which would only delay first tokens"),
            _QUEUED_REQS: PresetValue(512, "a reader would rather be told to come back than wait behind more"),
        },
        LONG_CONTEXT: {
            _BATCHED_TOKENS: PresetValue(4096, "a step full of prompt tokens stays short for those that generate"),
            _SEQS: PresetValue(64, "a long sequence holds many blocks; more of them would drive each other out"),
            _BLOCK_SIZE: PresetValue(16, "a shared document is found again to the nearest 16 tokens"),
            _LONG_PREFILL: PresetValue(1024, "four long prompts share a step, so that none waits for a whole other"),
            _LONG_PREFILLS: PresetValue(4, "as many as fill a step: there are few short prompts to protect"),
            _QUEUED_REQS: PresetValue(64, "each takes long, so whoever waits behind more waits too long"),
        },
        MIXED: {
            _BATCHED_TOKENS: PresetValue(8192, "short prompts fit into a step beside parts of long ones"),
            _SEQS: PresetValue(128, "room for many short requests, short of what long ones would overfill"),
            _BLOCK_SIZE: PresetValue(16, "little of a short request's last block is wasted"),
            _LONG_PREFILL: PresetValue(512, "a long prompt takes a sixteenth of a step: short ones pass beside it"),
            _LONG_PREFILLS: PresetValue(8, "half of a step for long prompts, the other half for short ones"),
            _QUEUED_REQS: PresetValue(256, "enough for a burst of short requests, not for a backlog of long ones"),
        },
    }
)
"""Preset -> dotted path -> value."""
