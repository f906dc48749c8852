"""Attention of packages that may be installed: FlashInfer and FlashAttention. Not verified on hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from isthmus.platforms import AttentionBatch, AttentionSpec, DeviceInfo
from isthmus.platforms.attention import KVCache
from isthmus.platforms.library_attention import LibraryAttentionBackend

if TYPE_CHECKING:
    from isthmus.ops.registry import KernelRegistry

HALVES = (torch.float16, torch.bfloat16)
FIRST_ARCH = 80
FLASHINFER_WORKSPACE_BYTES = 128 * 2**20
"""What its documentation recommends."""
FLASHINFER_HEAD_DIMS = (64, 128, 256)
FLASH_ATTENTION_BLOCK = 256
"""Its paged kernel takes multiples of this only."""


def register(registry: KernelRegistry) -> None:
    """Add the backends whose packages are installed."""
    for backend in (FlashInferBackend, FlashAttentionBackend):
        if backend.is_installed():
            registry.add_attention(backend)


def _common_reason(name: str, spec: AttentionSpec, info: DeviceInfo) -> str | None:
    if spec.dtype not in HALVES:
        return f"{name} computes in float16 and bfloat16"
    if int(info.arch.removeprefix("sm_")) < FIRST_ARCH:
        return f"{name} needs compute capability 8.0, this device is {info.arch}"
    return None


@dataclass(frozen=True, slots=True)
class FlashInferMetadata:
    """`slots` [T] int64, `num_tokens` without padding. The plan is in the wrapper."""

    slots: torch.Tensor
    num_tokens: int


class FlashInferBackend(LibraryAttentionBackend):
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`, which takes queries of any length, planned once a step."""

    name: ClassVar[str] = "flashinfer"
    package: ClassVar[str] = "flashinfer"
    install: ClassVar[str] = "pip install flashinfer-python"

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        import flashinfer

        workspace = torch.zeros(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

    @classmethod
    def declined(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        if spec.head_dim not in FLASHINFER_HEAD_DIMS:
            return f"head_dim {spec.head_dim}: {cls.name} has {', '.join(map(str, FLASHINFER_HEAD_DIMS))}"
        return _common_reason(cls.name, spec, info)

    def build_metadata(self, batch: AttentionBatch) -> FlashInferMetadata:
        """Requests without tokens, which pad the batch, are left out; they have no queries."""
        s = self.spec
        lens = batch.seq_lens_np[: batch.num_reqs]
        requests = np.flatnonzero(lens)
        lens = lens[requests]
        num_pages = -(-lens // s.block_size)
        starts = np.concatenate(([0], np.cumsum(num_pages)))
        rows = np.repeat(requests, num_pages)
        columns = np.arange(starts[-1]) - np.repeat(starts[:-1], num_pages)
        places = torch.from_numpy(np.stack((rows, columns))).to(self.device, non_blocking=True)
        self._wrapper.plan(
            qo_indptr=_int32(np.append(batch.query_start_loc_np[requests], batch.query_start_loc_np[batch.num_reqs])),
            paged_kv_indptr=_int32(starts),
            paged_kv_indices=batch.block_table[places[0], places[1]],
            paged_kv_last_page_len=_int32((lens - 1) % s.block_size + 1),
            num_qo_heads=s.num_heads,
            num_kv_heads=s.num_kv_heads,
            head_dim_qk=s.head_dim,
            page_size=s.block_size,
            causal=True,
            sm_scale=s.scale,
            window_left=-1 if s.sliding_window is None else s.sliding_window - 1,
            logits_soft_cap=s.soft_cap or 0.0,
            q_data_type=s.dtype,
            kv_data_type=s.kv_cache_dtype,
        )
        return FlashInferMetadata(batch.slot_mapping, batch.num_tokens)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: FlashInferMetadata
    ) -> torch.Tensor:
        self.write(kv_cache, k, v, metadata.slots)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if metadata.num_tokens:
            self._wrapper.run(q[: metadata.num_tokens], kv_cache, out=out[: metadata.num_tokens])
        return out


def _int32(values: np.ndarray) -> torch.Tensor:
    """On the host, where the planner wants it."""
    return torch.from_numpy(values.astype(np.int32))


@dataclass(frozen=True, slots=True)
class FlashAttentionMetadata:
    """`key_starts` [R+1] int32: running sums of the sequences' lengths, on the device."""

    batch: AttentionBatch
    key_starts: torch.Tensor


class FlashAttentionBackend(LibraryAttentionBackend):
    """`flash_attn.flash_attn_varlen_func` with a block table, of FlashAttention 2."""

    name: ClassVar[str] = "flash_attn"
    package: ClassVar[str] = "flash_attn"
    install: ClassVar[str] = "pip install flash-attn"

    @classmethod
    def declined(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        if spec.block_size % FLASH_ATTENTION_BLOCK:
            return (
                f"block size {spec.block_size}: {cls.name} takes multiples of {FLASH_ATTENTION_BLOCK}; set "
                f"cache.block_size={FLASH_ATTENTION_BLOCK}"
            )
        if spec.head_dim % 8 or spec.head_dim > 256:
            return f"head_dim {spec.head_dim}: {cls.name} has multiples of 8 up to 256"
        return _common_reason(cls.name, spec, info)

    def build_metadata(self, batch: AttentionBatch) -> FlashAttentionMetadata:
        starts = torch.zeros(batch.num_reqs + 1, dtype=torch.int32, device=self.device)
        torch.cumsum(batch.seq_lens[: batch.num_reqs], 0, dtype=torch.int32, out=starts[1:])
        return FlashAttentionMetadata(batch, starts)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: FlashAttentionMetadata
    ) -> torch.Tensor:
        from flash_attn import flash_attn_varlen_func

        batch, s = metadata.batch, self.spec
        self.write(kv_cache, k, v, batch.slot_mapping)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if batch.num_tokens:
            out[: batch.num_tokens] = flash_attn_varlen_func(
                q[: batch.num_tokens],
                *kv_cache,
                cu_seqlens_q=batch.query_start_loc[: batch.num_reqs + 1],
                cu_seqlens_k=metadata.key_starts,
                max_seqlen_q=batch.max_query_len,
                max_seqlen_k=batch.max_seq_len,
                softmax_scale=s.scale,
                causal=True,
                window_size=(-1, -1) if s.sliding_window is None else (s.sliding_window - 1, 0),
                softcap=s.soft_cap or 0.0,
                block_table=batch.block_table[: batch.num_reqs],
            )
        return out
