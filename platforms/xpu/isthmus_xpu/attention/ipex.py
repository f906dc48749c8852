"""Paged attention of Intel Extension for PyTorch (IPEX), archived in 2026: one backend for each of its two builds.

The two have one Python interface, whose parameters differ in order, and different cache layouts behind it: so arguments
go by keyword, and the layout is the backend's.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import ClassVar

import torch

from isthmus.platforms import AttentionBackend, AttentionBatch, AttentionSpec, CacheTensor, DeviceInfo, KVCacheLayout
from isthmus.platforms.attention import KVCache
from isthmus_xpu.attention.ipex_package import paged_attention
from isthmus_xpu.attention.real_batch import RealBatch
from isthmus_xpu.packages import IPEX

ONE_DECODE_KERNEL = "PAGED_ATTENTION_SINGLE_QUERY_KERNEL"
"""IPEX's own environment variable, read at every call."""
NO_WINDOW = -1
NO_SOFT_CAP = -1.0


class IpexAttentionBackend(AttentionBackend):
    """`PagedAttention.reshape_and_cache_flash`, then `PagedAttention.flash_attn_varlen_func`."""

    name: ClassVar[str] = IPEX
    dtypes: ClassVar[tuple[torch.dtype, ...]]

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._ops = paged_attention()

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        if spec.sinks or spec.mla_rank is not None:
            return "ipex has neither sinks nor MLA"
        if spec.dtype not in cls.dtypes:
            return f"ipex computes in {_names(cls.dtypes)} here, not in {_names((spec.dtype,))}"
        if spec.kv_cache_dtype != spec.dtype:
            return f"ipex is used with a cache of the compute dtype, not of {_names((spec.kv_cache_dtype,))}"
        return cls.declined(spec)

    @classmethod
    @abstractmethod
    def declined(cls, spec: AttentionSpec) -> str | None:
        """What more this build cannot do, in words for the user."""

    @abstractmethod
    def cache_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """Of K, and of V, as this build's kernels read it."""

    def kv_cache_layout(self, num_blocks: int) -> KVCacheLayout:
        one = CacheTensor(self.cache_shape(num_blocks), self.spec.kv_cache_dtype, block_dim=0)
        return KVCacheLayout((one, one))

    def build_metadata(self, batch: AttentionBatch) -> RealBatch:
        return RealBatch.of(batch)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: RealBatch
    ) -> torch.Tensor:
        """Rows of padding in the result are not written."""
        key_cache, value_cache = kv_cache
        real = slice(metadata.num_tokens)
        self._ops.reshape_and_cache_flash(
            key=k[real], value=v[real], key_cache=key_cache, value_cache=value_cache, slot_mapping=metadata.slots
        )
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.attend(out[real], q[real], key_cache, value_cache, metadata)
        return out

    def attend(
        self, out: torch.Tensor, q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, batch: RealBatch
    ) -> None:
        """Fill `out` with attention of q, both [num_tokens, H, D], to the caches: prompts, chunks and decodes alike."""
        window = self.spec.sliding_window
        self._ops.flash_attn_varlen_func(
            output=out,
            query=q,
            key_cache=key_cache,
            value_cache=value_cache,
            cu_seqlens_q=batch.query_start_loc,
            cu_seqlens_kv=batch.key_start_loc,
            max_seqlen_q=batch.max_query_len,
            max_seqlen_kv=batch.max_seq_len,
            scale=self.spec.scale,
            is_cusal=True,  # sic
            block_tables=batch.block_table,
            alibi_slopes=None,
            window_size_left=NO_WINDOW if window is None else window - 1,  # keys before the query's own
            window_size_right=NO_WINDOW,
            softcap=NO_SOFT_CAP if self.spec.soft_cap is None else self.spec.soft_cap,
        )


class IpexHostAttentionBackend(IpexAttentionBackend):
    """The CPU build. Cache: K and V apart, each [num_blocks, num_kv_heads, block_size, head_dim].

    A permuted view of another layout is read wrongly, without an error.
    """

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        # Otherwise four requests that share their first block are taken for beams of one, whose kernel refuses to run.
        os.environ[ONE_DECODE_KERNEL] = "1"
        group = spec.num_heads // spec.num_kv_heads
        self._head_mapping = torch.arange(spec.num_kv_heads, dtype=torch.int32).repeat_interleave(group)

    @classmethod
    def declined(cls, spec: AttentionSpec) -> str | None:
        if spec.sliding_window == 1:
            return "a sliding window of 1: ipex takes that for no window"
        return None

    def cache_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        s = self.spec
        return num_blocks, s.num_kv_heads, s.block_size, s.head_dim

    def attend(
        self, out: torch.Tensor, q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, batch: RealBatch
    ) -> None:
        """Batches of decodes go to a kernel of their own: measured on one core of an AVX-512 host, it takes half the
        time of the other one in float32, and a quarter or less in bfloat16. It has no soft cap within a window.
        """
        s = self.spec
        if batch.max_query_len > 1 or (s.sliding_window is not None and s.soft_cap is not None):
            super().attend(out, q, key_cache, value_cache, batch)
            return
        self._ops.single_query_cached_kv_attention(
            output=out,
            query=q,
            key_cache=key_cache,
            value_cache=value_cache,
            head_mapping=self._head_mapping,
            scale=s.scale,
            block_tables=batch.block_table,
            context_lens=batch.seq_lens,
            block_size=s.block_size,
            max_context_len=batch.max_seq_len,
            alibi_slopes=None,
            window_size=NO_WINDOW if s.sliding_window is None else s.sliding_window,  # keys, the query's own among them
            softcap=NO_SOFT_CAP if s.soft_cap is None else s.soft_cap,
        )


class IpexGpuAttentionBackend(IpexAttentionBackend):
    """The XPU build. Cache: K and V apart, each [num_blocks, block_size, num_kv_heads, head_dim].

    Written from the source of 2.8.10+xpu and never run on a GPU; what its own tests leave out is declined.
    """

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16)
    BLOCK_SIZES: ClassVar[tuple[int, ...]] = (16, 32, 64, 128)
    HEAD_DIM_STEP: ClassVar[int] = 64

    @classmethod
    def declined(cls, spec: AttentionSpec) -> str | None:
        if spec.head_dim % cls.HEAD_DIM_STEP or spec.head_dim > 256:
            return (
                f"head_dim {spec.head_dim}: ipex copies the whole cache at every step unless it is a multiple of "
                f"{cls.HEAD_DIM_STEP}, and goes up to 256"
            )
        if spec.block_size not in cls.BLOCK_SIZES:
            return f"block size {spec.block_size}: ipex is tested with {', '.join(map(str, cls.BLOCK_SIZES))}"
        if spec.sliding_window is not None or spec.soft_cap is not None:
            return "ipex is not tested with a sliding window or a soft cap on GPUs"
        return None

    def cache_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        s = self.spec
        return num_blocks, s.block_size, s.num_kv_heads, s.head_dim

    def attend(
        self, out: torch.Tensor, q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, batch: RealBatch
    ) -> None:
        """Its tests have contiguous queries only. Its kernel for decodes alone wants a cache of another layout."""
        super().attend(out, q.contiguous(), key_cache, value_cache, batch)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
