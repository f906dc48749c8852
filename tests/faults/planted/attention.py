"""Attention, requests of one size together, with a method for each thing that can be wrong."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch

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


@dataclass(frozen=True, slots=True)
class Metadata:
    """The step's own tensors, at the engine's addresses; block_table [R, B] has whole rows of its buffer, so that a
    replay sees longer sequences too.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class PlantedAttention(AttentionBackend):
    """Cache: keys [num_blocks, K, D, block_size], values [K, num_blocks, block_size, D]."""

    name: ClassVar[str] = "planted"
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        return "no sinks and no MLA" if spec.sinks or spec.mla_rank is not None else None

    def kv_cache_layout(self, num_blocks: int) -> KVCacheLayout:
        s = self.spec
        keys = (num_blocks, s.num_kv_heads, s.head_dim, s.block_size)
        values = (s.num_kv_heads, num_blocks, s.block_size, s.head_dim)
        return KVCacheLayout((CacheTensor(keys, s.kv_cache_dtype, 0), CacheTensor(values, s.kv_cache_dtype, 1)))

    def build_metadata(self, batch: AttentionBatch) -> Metadata:
        table = batch.block_table
        whole_rows = table.as_strided((len(table), table.stride(0)), table.stride())
        return Metadata(batch.query_start_loc, batch.seq_lens, whole_rows, batch.slot_mapping)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: Metadata
    ) -> torch.Tensor:
        self.write(kv_cache, k, v, metadata.slot_mapping)
        groups = defaultdict(list)
        for start, end, table, length in self.requests(metadata):
            groups[end - start, length].append((start, table))
        out = torch.zeros_like(q)
        for (count, length), members in groups.items():
            starts, tables = zip(*members, strict=True)
            rows = torch.tensor(starts)[:, None] + torch.arange(count)
            out[rows] = self.attend(q[rows], *self.read(kv_cache, torch.stack(tables), length))
        return out

    def requests(self, metadata: Metadata) -> list[tuple[int, int, torch.Tensor, int]]:
        """(first token, end, row of the block table, length) of every request that is no padding."""
        bounds = pairwise(metadata.query_start_loc.tolist())
        rows = zip(bounds, metadata.block_table, metadata.seq_lens.tolist(), strict=True)
        return [(start, end, table, length) for (start, end), table, length in rows if start < end]

    def write(self, kv_cache: KVCache, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        keys, values = kv_cache
        real = slots >= 0
        blocks, offsets = slots[real] // self.spec.block_size, slots[real] % self.spec.block_size
        keys[blocks, :, :, offsets] = k[real]
        values[:, blocks, offsets] = v[real].transpose(0, 1)

    def read(self, kv_cache: KVCache, tables: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """tables [N, B] -> keys [N, H, D, length], values [N, H, length, D]"""
        blocks = tables[:, : -(-length // self.spec.block_size)].long()
        keys = kv_cache[0][blocks].permute(0, 2, 3, 1, 4).flatten(3)[..., :length]
        values = kv_cache[1][:, blocks].transpose(0, 1).flatten(2, 3)[:, :, :length]
        heads = self.kv_heads()
        return keys[:, heads], values[:, heads]

    def kv_heads(self) -> torch.Tensor:
        """The kv head of every query head."""
        return torch.arange(self.spec.num_heads) // (self.spec.num_heads // self.spec.num_kv_heads)

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """q [N, n, H, D] of the last n tokens of N requests of one length -> [N, n, H, D]"""
        scores = self.capped(torch.matmul(q.transpose(1, 2).float(), keys.float()) * self.scale())
        count, length = scores.shape[-2:]
        distance = torch.arange(length - count, length)[:, None] - torch.arange(length)
        weights = scores.masked_fill(~self.visible(distance), -torch.inf).softmax(-1)
        return self.weigh(weights, values).to(q.dtype).transpose(1, 2)

    def scale(self) -> float:
        return self.spec.scale

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        cap = self.spec.soft_cap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def visible(self, distance: torch.Tensor) -> torch.Tensor:
        """distance [n, length]: from each key to each query."""
        window = self.spec.sliding_window
        return (distance >= 0) & (distance < (window or torch.inf))

    def weigh(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """weights [N, H, n, length], values [N, H, length, D] -> [N, H, n, D]"""
        return torch.matmul(weights, values.float())
