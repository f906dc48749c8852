"""NULL platform: the whole engine with nothing computed, for tests of scheduling and for its pure cost.

The model's forward gives zeros, attention gives zeros and writes no cache, and a sampled token is a hash of the row's
seed. The engine derives that seed from the request's seed and the position, so a token depends on these two only:
chunking, preemption, caching and batch mates cannot change it, and a test can tell when they did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from isthmus.platforms import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    BatchShape,
    CacheTensor,
    DeviceInfo,
    GraphBackend,
    GraphSupport,
    KVCacheLayout,
    MemoryStats,
    Platform,
)
from isthmus.platforms.host_memory import host_memory_stats

if TYPE_CHECKING:
    from isthmus.config import EngineConfig
    from isthmus.ops.registry import KernelRegistry
    from isthmus.platforms.attention import KVCache
    from isthmus.platforms.graph import Forward

PROVIDER = "null"
_TOTAL_BYTES = 2**30


class NullAttentionBackend(AttentionBackend):
    """Takes any spec, stores one byte a block, attends to nothing."""

    name = PROVIDER
    graph_support = GraphSupport.ALWAYS

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        return None

    def kv_cache_layout(self, num_blocks: int) -> KVCacheLayout:
        return KVCacheLayout((CacheTensor((num_blocks, 1), torch.int8, block_dim=0),))

    def build_metadata(self, batch: AttentionBatch) -> None:
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: Any
    ) -> torch.Tensor:
        return torch.zeros_like(q)


class NullGraphBackend(GraphBackend):
    """No padding; a step costs one zero-filled tensor."""

    def pad(self, shape: BatchShape) -> BatchShape:
        return shape

    def wrap(self, forward: Forward) -> Forward:
        """Runs `forward` once, to learn what its result looks like, and gives zeros [T, hidden_size] from then on."""
        sample: torch.Tensor | None = None

        @torch.inference_mode()
        def zeros(input_ids: torch.Tensor, positions: torch.Tensor, ctx: Any) -> torch.Tensor:
            nonlocal sample
            if sample is None:
                sample = forward(input_ids, positions, ctx)[:0].clone()
            return sample.new_zeros((input_ids.shape[0], *sample.shape[1:]))

        return zeros


class NullPlatform(Platform):
    """A device that computes nothing."""

    name = "null"
    device_type = "cpu"
    profile_tokens = 1
    unclaimed = MappingProxyType(
        {
            "ops": "a token is a hash of its row's seed",
            "attention": "attends to nothing",
            "blocks": "stores nothing",
            "model": "computes nothing",
            "graph": "gives zeros instead of running the model",
        }
    )

    def device_info(self, index: int = 0) -> DeviceInfo:
        return DeviceInfo("NULL", "null", _TOTAL_BYTES, ("float32", "bfloat16", "float16"))

    def init_device(self, local_rank: int) -> torch.device:
        return torch.device(self.device_type)

    def memory_stats(self, device: torch.device, *, reset_peak: bool = False) -> MemoryStats:
        """The host's, as far as it is counted: what a step takes is the process's own."""
        return host_memory_stats(reset_peak=reset_peak)

    def config_defaults(self, config: EngineConfig) -> Mapping[str, object]:
        """A block count, because a pool sized from one-byte blocks would have a thousand million of them."""
        return {"cache.block_size": 16, "cache.num_blocks": 8192, "cache.swap_space_gib": 0.0}

    def kernel_priority(self) -> Mapping[str, Sequence[str]]:
        return {"attention": [PROVIDER], "*": [PROVIDER]}

    def graph_backend(self, config: EngineConfig, device: torch.device) -> GraphBackend:
        return NullGraphBackend()


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
) -> torch.Tensor:
    """Tokens [R] int64: hash(seeds [R] int64) modulo the vocabulary of `logits` [R, V]; the rest is ignored."""
    return _unsigned_shift(_splitmix64(seeds), 1) % logits.shape[1]


def register_kernels(registry: KernelRegistry) -> None:
    """Add the null attention and the null sampler."""
    registry.add_attention(NullAttentionBackend)
    registry.add_op("sample", PROVIDER, sample)


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    """One step of SplitMix64 (Steele, Lea, Flood 2014) on int64 seen as uint64; int64 products wrap as needed."""
    x = x + _as_int64(0x9E3779B97F4A7C15)
    x = (x ^ _unsigned_shift(x, 30)) * _as_int64(0xBF58476D1CE4E5B9)
    x = (x ^ _unsigned_shift(x, 27)) * _as_int64(0x94D049BB133111EB)
    return x ^ _unsigned_shift(x, 31)


def _unsigned_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _as_int64(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
