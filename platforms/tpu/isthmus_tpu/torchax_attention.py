"""The Pallas kernel as an attention backend of the engine, for models that run through torchax."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import jax
import torch
import torch.nn.functional as F
from torchax.interop import call_jax

from isthmus.platforms import AttentionBatch
from isthmus.platforms.attention import KVCache
from isthmus_tpu.pallas_attention import ragged_paged_attention, write_to_pages
from isthmus_tpu.pallas_backend import PallasBackend

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


class PallasAttentionBackend(PallasBackend):
    """On torchax tensors."""

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
            cache.copy_(call_jax(write_to_pages, cache, self.widened(new), metadata.slots))
        attended = call_jax(
            ragged_paged_attention,
            self.widened(q),
            key_cache,
            value_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            **self.options(decode=metadata.decode),
        )
        return attended[..., : s.head_dim]


class InterpretedPallasBackend(PallasAttentionBackend):
    """The same on a device that is no TPU: how the kernel is tested."""

    name: ClassVar[str] = "pallas_interpret"
    interpret: ClassVar[bool] = True
