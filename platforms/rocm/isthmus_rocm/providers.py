"""Attention of a package that may be installed: AITER. Not verified on hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from isthmus.platforms import AttentionBatch, AttentionSpec, DeviceInfo
from isthmus.platforms.attention import KVCache
from isthmus.platforms.library_attention import LibraryAttentionBackend

if TYPE_CHECKING:
    from isthmus.ops.registry import KernelRegistry

ARCHS = ("gfx942", "gfx950")


def register(registry: KernelRegistry) -> None:
    """Add the backend if its package is installed."""
    if AiterBackend.is_installed():
        registry.add_attention(AiterBackend)


class AiterBackend(LibraryAttentionBackend):
    """`aiter.ops.triton.unified_attention.unified_attention`: prefills and decodes in one launch.

    It chooses its kernel by the lengths of a step, so no captured graph may contain it.
    """

    name: ClassVar[str] = "aiter"
    package: ClassVar[str] = "aiter"
    install: ClassVar[str] = "install AITER from its sources, or take an image of AMD's that has it"

    @classmethod
    def declined(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        if spec.dtype not in (torch.float16, torch.bfloat16):
            return f"{cls.name} computes in float16 and bfloat16"
        if info.arch not in ARCHS:
            return f"{cls.name} is for {' and '.join(ARCHS)}, this device is {info.arch}"
        return None

    def build_metadata(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: AttentionBatch
    ) -> torch.Tensor:
        from aiter.ops.triton.unified_attention import unified_attention

        s, num_reqs, num_tokens = self.spec, metadata.num_reqs, metadata.num_tokens
        self.write(kv_cache, k, v, metadata.slot_mapping)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if num_tokens:
            unified_attention(
                q=q[:num_tokens],
                k=kv_cache[0],
                v=kv_cache[1],
                out=out[:num_tokens],
                cu_seqlens_q=metadata.query_start_loc[: num_reqs + 1],
                max_seqlen_q=metadata.max_query_len,
                seqused_k=metadata.seq_lens[:num_reqs],
                max_seqlen_k=metadata.max_seq_len,
                softmax_scale=s.scale,
                causal=True,
                window_size=(-1, -1) if s.sliding_window is None else (s.sliding_window - 1, 0),
                block_table=metadata.block_table[:num_reqs],
                softcap=s.soft_cap or 0.0,
                q_descale=None,
                k_descale=None,
                v_descale=None,
            )
        return out
