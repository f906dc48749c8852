"""The cache layout that GPU kernels agree on, and writing to it in plain torch."""

from __future__ import annotations

import torch

from isthmus.platforms import AttentionSpec, CacheTensor, KVCacheLayout
from isthmus.platforms.attention import KVCache


def paged_layout(spec: AttentionSpec, num_blocks: int) -> KVCacheLayout:
    """K and V apart, each [num_blocks, block_size, num_kv_heads, head_dim]."""
    shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
    one = CacheTensor(shape, spec.kv_cache_dtype, block_dim=0)
    return KVCacheLayout((one, one))


def write(kv_cache: KVCache, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """The first rows of k and v [T, K, D], as many as there are slots, none negative. The device is not waited for."""
    for cache, new in zip(kv_cache, (k, v), strict=True):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new[: len(slots)].to(cache.dtype))
