"""The Pallas kernel as an attention backend of the engine, for models that run through torchax."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import torch
import torch.nn.functional as F
from torchax.interop import call_jax

from isthmus.platforms import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    CacheTensor,
    DeviceInfo,
    GraphSupport,
    KVCacheLayout,
)
from isthmus.platforms.attention import KVCache
from isthmus_tpu.pallas_attention import LANES, Tiling, default_tiling, ragged_paged_attention, write_to_pages

TABLE_WIDTH = 16
"""Columns of the narrowest block table; wider ones are the next power of two, so that programs stay few."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PallasMetadata:
    """`slots` [T] int32, -1 = padding.  The rest as in `AttentionBatch`, int32.

    decode: no request has more than one token; part of the program's identity.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    decode: bool = field(metadata={"static": True})


class PallasAttentionBackend(AttentionBackend):
    """Cache: K and V apart, each [num_blocks, num_kv_heads, block_size, D], with D rounded up to the 128 lanes."""

    name: ClassVar[str] = "pallas"
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS
    interpret: ClassVar[bool] = False
    """Whether the kernel runs in Pallas's interpreter, which any JAX device has, instead of on a TPU."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._head_dim = -(-spec.head_dim // LANES) * LANES

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        if spec.mla_rank is not None:
            return "pallas has no MLA"
        if spec.sinks:
            return "pallas has no attention sinks"
        rows = 32 // spec.kv_cache_dtype.itemsize
        if spec.block_size % rows:
            return f"block_size={spec.block_size} is not a multiple of {rows}, the rows of a {spec.kv_cache_dtype} tile"
        return None

    def kv_cache_layout(self, num_blocks: int) -> KVCacheLayout:
        s = self.spec
        one = CacheTensor((num_blocks, s.num_kv_heads, s.block_size, self._head_dim), s.kv_cache_dtype, block_dim=0)
        return KVCacheLayout((one, one))

    def tiling(self, *, decode: bool) -> Tiling:
        """What the kernel runs with on this spec."""
        s = self.spec
        itemsize = s.kv_cache_dtype.itemsize
        return default_tiling(s.num_heads, s.num_kv_heads, self._head_dim, s.block_size, itemsize, decode=decode)

    def build_metadata(self, batch: AttentionBatch) -> PallasMetadata:
        width = batch.block_table.shape[1]
        padding = max(TABLE_WIDTH, 1 << (width - 1).bit_length()) - width
        return PallasMetadata(
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=F.pad(batch.block_table, (0, padding)),
            slots=batch.slot_mapping.to(torch.int32),
            decode=batch.max_query_len == 1,
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: PallasMetadata
    ) -> torch.Tensor:
        s = self.spec
        key_cache, value_cache = kv_cache
        for cache, new in ((key_cache, k), (value_cache, v)):
            cache.copy_(call_jax(write_to_pages, cache, self._widened(new), metadata.slots))
        attended = call_jax(
            ragged_paged_attention,
            self._widened(q),
            key_cache,
            value_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            **self._options(decode=metadata.decode),
        )
        return attended[..., : s.head_dim]

    def _widened(self, x: torch.Tensor) -> torch.Tensor:
        """[T, heads, head_dim] -> [T, heads, D]; zeros change no score, and their part of the output is cut off."""
        return x if self._head_dim == x.shape[-1] else F.pad(x, (0, self._head_dim - x.shape[-1]))

    def _options(self, *, decode: bool) -> dict[str, Any]:
        s = self.spec
        return {
            "scale": s.scale,
            "sliding_window": s.sliding_window,
            "soft_cap": s.soft_cap,
            "tiling": self.tiling(decode=decode),
            "interpret": self.interpret,
        }


class InterpretedPallasBackend(PallasAttentionBackend):
    """The same on a device that is no TPU: how the kernel is tested."""

    name: ClassVar[str] = "pallas_interpret"
    interpret: ClassVar[bool] = True
