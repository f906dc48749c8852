"""FlashAttention for Intel GPUs from the package vllm-xpu-kernels. Never run on a GPU by this project."""

from __future__ import annotations

import importlib
from typing import ClassVar

import torch

from isthmus.platforms import AttentionBackend, AttentionBatch, AttentionSpec, DeviceInfo, KVCacheLayout
from isthmus.platforms.attention import KVCache
from isthmus_xpu.attention.paged_cache import paged_layout, write
from isthmus_xpu.attention.real_batch import RealBatch
from isthmus_xpu.packages import VLLM_XPU

MODULE = "vllm_xpu_kernels.flash_attn_interface"
HALVES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 192, 256)
BLOCK_SIZE_STEP = 64


class VllmXpuAttentionBackend(AttentionBackend):
    """`flash_attn_varlen_func` with a block table. Cache: K and V apart, each [num_blocks, block_size, K, D].

    Declines what the package's own tests leave out: there it falls back to a slow reference or has no kernel at all.
    """

    name: ClassVar[str] = VLLM_XPU

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._attend = importlib.import_module(MODULE).flash_attn_varlen_func

    @classmethod
    def import_problem(cls) -> str | None:
        """Why the installed package cannot be used, found by importing it: its libraries need torch's XPU build."""
        try:
            interface = importlib.import_module(MODULE)
        except (ImportError, OSError) as error:
            return f"vllm-xpu-kernels cannot be imported: {error}"
        if not interface.FA2_AVAILABLE:
            return f"vllm-xpu-kernels cannot load its kernels: {interface.FA2_UNAVAILABLE_REASON}"
        return None

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        if spec.sinks or spec.mla_rank is not None:
            return "vllm_xpu is not used for sinks or MLA"
        if spec.dtype not in HALVES or spec.kv_cache_dtype != spec.dtype:
            return f"vllm_xpu computes in float16 and bfloat16 on a cache of the same, not in {spec.dtype}"
        if spec.head_dim not in HEAD_DIMS:
            return f"head_dim {spec.head_dim}: vllm_xpu has {', '.join(map(str, HEAD_DIMS))}"
        if spec.block_size % BLOCK_SIZE_STEP:
            return f"block size {spec.block_size}: vllm_xpu takes multiples of {BLOCK_SIZE_STEP}; set cache.block_size"
        if spec.soft_cap is not None:
            return "vllm_xpu is not tested with a soft cap"
        return None

    def kv_cache_layout(self, num_blocks: int) -> KVCacheLayout:
        return paged_layout(self.spec, num_blocks)

    def build_metadata(self, batch: AttentionBatch) -> RealBatch:
        return RealBatch.of(batch)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: RealBatch
    ) -> torch.Tensor:
        """Rows of padding in the result are not written."""
        write(kv_cache, k, v, metadata.slots.long())
        key_cache, value_cache = kv_cache
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        window = self.spec.sliding_window
        self._attend(
            q=q[: metadata.num_tokens],
            k=key_cache,
            v=value_cache,
            out=out[: metadata.num_tokens],
            cu_seqlens_q=metadata.query_start_loc,
            seqused_k=metadata.seq_lens,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=self.spec.scale,
            causal=True,
            window_size=None if window is None else [window - 1, 0],
            block_table=metadata.block_table,
        )
        return out
