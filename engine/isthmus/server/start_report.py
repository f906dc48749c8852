"""What a server says of its engine once that is ready."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from isthmus.config import EngineConfig
from isthmus.engine.engine_info import EngineInfo

_GIB, _MIB = 2**30, 2**20


def start_report(
    config: EngineConfig, info: EngineInfo, max_model_len: int, stage_times_s: Mapping[str, float]
) -> Iterator[str]:
    """Lines: the device, the time that each stage took, where the memory went, and what it is enough for."""
    yield f"{config.model.model} on {info.platform} ({info.device})"
    stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in stage_times_s.items())
    yield f"ready after {sum(stage_times_s.values()):.1f} s: {stages}"
    blocks = " + ".join(f"{count:,}" for count in info.num_blocks)
    yield (
        f"memory: weights {size(info.weights_bytes)}, activations {size(info.activations_bytes)}, KV pool "
        f"{size(info.kv_pool_bytes)} ({blocks} blocks of {info.block_size} tokens), host pool "
        f"{size(int(config.cache.swap_space_gib * _GIB))}"
    )
    num_fitting = info.num_blocks[0] * info.block_size / max_model_len
    yield f"{num_fitting:.1f} requests of the maximum length, {max_model_len:,} tokens, fit in the KV pool"


def size(num_bytes: int) -> str:
    """In GiB or MiB."""
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.1f} MiB"
