"""The Pallas kernel as an attention backend of torch_xla, whose programs may contain functions of JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from isthmus.platforms import AttentionBatch, GraphSupport
from isthmus.platforms.attention import KVCache
from isthmus_tpu.block_moves import BlocksInPieces
from isthmus_tpu.pallas_attention import ragged_paged_attention
from isthmus_tpu.pallas_backend import PallasBackend
from isthmus_tpu.xla_call_jax import call_jax


@dataclass(frozen=True, slots=True)
class XlaPallasMetadata:
    """As in `AttentionBatch`; slots [T] int64, -1 = padding.  decode: no request has more than one token."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slots: torch.Tensor
    decode: bool


class XlaPallasBackend(BlocksInPieces, PallasBackend):
    """Padding is written to the null block, as zeros: what was there."""

    graph_support: ClassVar[GraphSupport] = GraphSupport.NEVER
    """Metadata is made anew each step, so nothing may hold on to its addresses. A program that takes it may."""

    def build_metadata(self, batch: AttentionBatch) -> XlaPallasMetadata:
        return XlaPallasMetadata(
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
            slots=batch.slot_mapping,
            decode=batch.max_query_len == 1,
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: XlaPallasMetadata
    ) -> torch.Tensor:
        key_cache, value_cache = kv_cache
        write_heads(key_cache, self.widened(k), metadata.slots)
        write_heads(value_cache, self.widened(v), metadata.slots)
        inputs = (self.widened(q), key_cache, value_cache, metadata.query_start_loc, metadata.seq_lens)
        kernel = _kernel(**self.options(decode=metadata.decode))
        attended: torch.Tensor = call_jax(kernel, (*inputs, metadata.block_table))
        return attended[..., : self.spec.head_dim]


class InterpretedXlaPallasBackend(XlaPallasBackend):
    """The same on XLA's CPU device: how the kernel is tested within the engine. Used only by name."""

    name: ClassVar[str] = "pallas_interpret"
    interpret: ClassVar[bool] = True


def write_heads(cache: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> None:
    """cache [num_blocks, K, block_size, D] <- x [T, K, D] at slots [T]; padding, -1, writes zeros to the null block.

    Three indices, no view of the cache: only so is a compiled program allowed to write in place.
    """
    is_real = slots >= 0
    slots = torch.where(is_real, slots, 0)[:, None]
    values = torch.where(is_real[:, None, None], x, 0).to(cache.dtype)
    _, num_kv_heads, block_size, _ = cache.shape
    heads = torch.arange(num_kv_heads, device=cache.device)[None]
    cache.index_put_((slots // block_size, heads, slots % block_size), values)


@functools.cache
def _kernel(**options: Any) -> Callable[..., Any]:
    """One object for equal options, since torch_xla looks up by identity what it has traced."""
    return functools.partial(ragged_paged_attention, **options)
