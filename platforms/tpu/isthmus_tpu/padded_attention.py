"""The attention provider "padded": plain torch with shapes that depend on the step's `BatchShape` alone."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from isthmus.platforms import (
    AttentionBatch,
    AttentionSpec,
    CacheTensor,
    DeviceInfo,
    GraphSupport,
    KVCacheLayout,
)
from isthmus.platforms.attention import KVCache
from isthmus_tpu.block_moves import BlocksInPieces
from isthmus_tpu.online_softmax import Loop, Tiles, attend, python_loop, write
from isthmus_tpu.tiles import make_tiles


@dataclass(frozen=True, slots=True)
class PaddedMetadata:
    """slots [T] int64, -1 = padding.  block_table [R, B] int32.  On the device."""

    slots: torch.Tensor
    block_table: torch.Tensor
    tiles: Tiles


class PaddedAttentionBackend(BlocksInPieces):
    """Cache: K and V apart, each [num_blocks, block_size, num_kv_heads, head_dim].

    Padding is written to the null block, as zeros: what was there.
    """

    name: ClassVar[str] = "padded"
    graph_support: ClassVar[GraphSupport] = GraphSupport.NEVER
    """Metadata is made anew each step, so nothing may hold on to its addresses. A program that takes it may."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self.loop = _loop(device)

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        if spec.mla_rank is not None:
            return "padded has no MLA"
        if spec.sinks:
            return "padded has no attention sinks"
        return None

    def kv_cache_layout(self, num_blocks: int) -> KVCacheLayout:
        s = self.spec
        one = CacheTensor((num_blocks, s.block_size, s.num_kv_heads, s.head_dim), s.kv_cache_dtype, block_dim=0)
        return KVCacheLayout((one, one))

    def build_metadata(self, batch: AttentionBatch) -> PaddedMetadata:
        tiles = make_tiles(batch, len(batch.slot_mapping), self.spec.block_size, self.spec.sliding_window)
        on_device = {field.name: getattr(tiles, field.name).to(self.device) for field in fields(tiles)}
        return PaddedMetadata(batch.slot_mapping, batch.block_table, Tiles(**on_device))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: PaddedMetadata
    ) -> torch.Tensor:
        key_cache, value_cache = kv_cache
        write(key_cache, k, metadata.slots)
        write(value_cache, v, metadata.slots)
        return attend(q, key_cache, value_cache, metadata.block_table, metadata.tiles, self.spec, self.loop)


def _loop(device: torch.device) -> Loop:
    if device.type != "xla":
        return python_loop
    from isthmus_tpu.xla_loop import XlaLoop

    return XlaLoop()
