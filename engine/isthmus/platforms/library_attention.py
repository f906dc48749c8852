"""Attention kernels of packages that may be installed beside isthmus: what their backends have in common."""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from typing import ClassVar

import torch

from isthmus.platforms.attention import AttentionBackend, AttentionSpec, CacheTensor, KVCache, KVCacheLayout
from isthmus.platforms.facts import DeviceInfo


class LibraryAttentionBackend(AttentionBackend):
    """Cache: K and V apart, each [num_blocks, block_size, num_kv_heads, head_dim]."""

    package: ClassVar[str]
    """What is imported."""
    install: ClassVar[str]
    """How to get it, for people."""

    @classmethod
    def is_installed(cls) -> bool:
        """Whether the package is there; it is not imported."""
        return importlib.util.find_spec(cls.package) is not None

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        if not cls.is_installed():
            return f"the package {cls.package} is not installed; {cls.install}"
        if spec.sinks or spec.mla_rank is not None:
            return f"{cls.name} is not used for sinks or MLA"
        if spec.kv_cache_dtype != spec.dtype:
            return f"{cls.name} is used with a cache of the compute dtype, not of {spec.kv_cache_dtype}"
        return cls.declined(spec, info)

    @classmethod
    @abstractmethod
    def declined(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        """What more the package cannot do, in words for the user; None if it can serve `spec` on `info`."""

    def kv_cache_layout(self, num_blocks: int) -> KVCacheLayout:
        s = self.spec
        one = CacheTensor((num_blocks, s.block_size, s.num_kv_heads, s.head_dim), s.kv_cache_dtype, block_dim=0)
        return KVCacheLayout((one, one))

    def write(self, kv_cache: KVCache, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """k, v [T, K, D] to slots [T] int64, of which -1 are none. The device is not waited for.

        Rows without a slot write back what slot 0 has, which is in the null block.
        """
        is_padding = (slots < 0)[:, None, None]
        places = slots.clamp(min=0)
        for cache, new in zip(kv_cache, (k, v), strict=True):
            flat = cache.view(-1, *cache.shape[2:])
            flat.index_copy_(0, places, torch.where(is_padding, flat[:1], new.to(cache.dtype)))
