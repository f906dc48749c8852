"""Other names of settings, and the nearest name to a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

FLAT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "model": "model.model",
        "tokenizer": "model.tokenizer",
        "revision": "model.revision",
        "dtype": "model.dtype",
        "max_model_len": "model.max_model_len",
        "seed": "model.seed",
        "load_format": "load.format",
        "block_size": "cache.block_size",
        "num_blocks": "cache.num_blocks",
        "memory_fraction": "cache.memory_fraction",
        "memory_cap_bytes": "cache.memory_cap_bytes",
        "kv_cache_dtype": "cache.kv_cache_dtype",
        "enable_prefix_caching": "cache.enable_prefix_caching",
        "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
        "max_num_seqs": "scheduler.max_num_seqs",
        "long_prefill_token_threshold": "scheduler.long_prefill_token_threshold",
        "preset": "scheduler.preset",
        "scheduling_policy": "scheduler.policy",
        "preemption_mode": "scheduler.preemption_mode",
        "max_num_queued_reqs": "scheduler.max_num_queued_reqs",
        "max_num_queued_tokens": "scheduler.max_num_queued_tokens",
        "async_scheduling": "scheduler.async_scheduling",
        "swap_space_gib": "cache.swap_space_gib",
        "tensor_parallel_size": "parallel.tensor_parallel_size",
        "device": "device.device",
        "num_threads": "device.num_threads",
        "attention_backend": "kernels.attention",
        "log_level": "observability.log_level",
        "record_schedule": "observability.record_schedule",
        # Names that users of vLLM have in their scripts.
        "gpu_memory_utilization": "cache.memory_fraction",
        "num_gpu_blocks_override": "cache.num_blocks",
    }
)
"""Keyword argument of `LLM`, and flag without its section -> dotted path."""


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """What to do about an unknown name: the candidate that was probably meant, or where all of them are listed.

    A candidate with the same last part comes first: the right setting was looked for in the wrong section.
    """
    names = list(candidates)
    same_leaf = [candidate for candidate in names if _leaf(candidate) == _leaf(name)]
    near = same_leaf or difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else "docs/configuration.md lists the settings"


def _leaf(name: str) -> str:
    return name.replace("__", ".").rpartition(".")[2]
