"""Blocks gathered on the device, then torch's own `scaled_dot_product_attention`: needs no package.

The native backend does the same and reads the block table back to plan; here planning needs the host's copies alone, so
that the device is not waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from isthmus.platforms import AttentionBackend, AttentionBatch, AttentionSpec, DeviceInfo, KVCacheLayout
from isthmus.platforms.attention import KVCache
from isthmus_xpu.attention.paged_cache import paged_layout, write
from isthmus_xpu.packages import SDPA

MAX_GATHERED_TOKENS = 65536
"""Keys that one piece of work copies out of the cache, unless a single request has more."""
MAX_QUERY_ROWS = 512
"""Queries of one piece of work, so that its mask stays small."""


@dataclass(frozen=True, slots=True)
class Piece:
    """r requests with n queries each, over the same number S of gathered keys, of whole blocks.

    tokens [r * n] int64: places in the batch.  blocks [r, S / block_size] int64.  mask [r, 1, n, S] bool, true where a
    query sees a key.
    """

    tokens: torch.Tensor
    blocks: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class SdpaMetadata:
    """`slots` [num_tokens] int64."""

    slots: torch.Tensor
    pieces: tuple[Piece, ...]


class SdpaAttentionBackend(AttentionBackend):
    """Cache: K and V apart, each [num_blocks, block_size, num_kv_heads, head_dim]."""

    name: ClassVar[str] = SDPA

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        if spec.sinks or spec.mla_rank is not None:
            return "sdpa has neither sinks nor MLA"
        if spec.soft_cap is not None:
            return "sdpa has no soft cap: torch's scaled_dot_product_attention has none"
        return None

    def kv_cache_layout(self, num_blocks: int) -> KVCacheLayout:
        return paged_layout(self.spec, num_blocks)

    def build_metadata(self, batch: AttentionBatch) -> SdpaMetadata:
        starts, lens = batch.query_start_loc_np[: batch.num_reqs + 1], batch.seq_lens_np[: batch.num_reqs]
        query_lens = np.diff(starts)
        decodes = np.flatnonzero(query_lens == 1)
        pieces = [self._decode(reqs, starts, lens, batch) for reqs in self._alike(decodes, lens)]
        for req in np.flatnonzero(query_lens > 1).tolist():
            pieces += self._chunks(req, starts, lens, batch)
        return SdpaMetadata(batch.slot_mapping[: batch.num_tokens].clamp(min=0), tuple(pieces))

    def _alike(self, reqs: np.ndarray, lens: np.ndarray) -> Iterator[np.ndarray]:
        """Requests in groups, longest first, that do not gather too much: each member costs as much as the longest."""
        order = reqs[np.argsort(-lens[reqs], kind="stable")]
        while len(order):
            count = max(MAX_GATHERED_TOKENS // int(lens[order[0]]), 1)
            yield order[:count]
            order = order[count:]

    def _decode(self, reqs: np.ndarray, starts: np.ndarray, lens: np.ndarray, batch: AttentionBatch) -> Piece:
        num_blocks = -(-int(lens[reqs].max()) // self.spec.block_size)
        rows = self._on_device(reqs)
        blocks = batch.block_table[:, :num_blocks].index_select(0, rows).long()
        return Piece(self._on_device(starts[reqs]), blocks, self._mask(lens[reqs, None] - 1, 0, num_blocks))

    def _chunks(self, req: int, starts: np.ndarray, lens: np.ndarray, batch: AttentionBatch) -> Iterator[Piece]:
        """The queries of one request, some at a time, over the blocks that hold what they see."""
        size, window = self.spec.block_size, self.spec.sliding_window
        start, end = int(starts[req]), int(starts[req + 1])
        first_position = int(lens[req]) - (end - start)
        for at in range(start, end, MAX_QUERY_ROWS):
            stop = min(at + MAX_QUERY_ROWS, end)
            positions = first_position + np.arange(at - start, stop - start)
            first_block = 0 if window is None else max(int(positions[0]) - window + 1, 0) // size
            last_block = int(positions[-1]) // size
            yield Piece(
                self._on_device(np.arange(at, stop)),
                batch.block_table[req : req + 1, first_block : last_block + 1].long(),
                self._mask(positions[None], first_block * size, last_block + 1 - first_block),
            )

    def _mask(self, positions: np.ndarray, first_key: int, num_blocks: int) -> torch.Tensor:
        """[r, 1, n, S] of queries at positions [r, n], over the keys from position `first_key` on."""
        query = self._on_device(positions)[:, None, :, None]
        key = torch.arange(first_key, first_key + num_blocks * self.spec.block_size, device=self.device)
        mask = key <= query
        if self.spec.sliding_window is not None:
            mask &= key > query - self.spec.sliding_window
        return mask

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.device, non_blocking=True)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: SdpaMetadata
    ) -> torch.Tensor:
        """Rows of padding in the result are not written."""
        write(kv_cache, k, v, metadata.slots)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for piece in metadata.pieces:
            out.index_copy_(0, piece.tokens, self._attend(q, kv_cache, piece))
        return out

    def _attend(self, q: torch.Tensor, kv_cache: KVCache, piece: Piece) -> torch.Tensor:
        """[r * n, H, D]"""
        s, num_reqs = self.spec, len(piece.blocks)
        query = q.index_select(0, piece.tokens).unflatten(0, (num_reqs, -1)).transpose(1, 2)
        blocks = piece.blocks.flatten()
        gathered = (cache.index_select(0, blocks).view(num_reqs, -1, *cache.shape[2:]) for cache in kv_cache)
        keys, values = (tensor.transpose(1, 2).to(s.dtype) for tensor in gathered)
        is_grouped = s.num_heads != s.num_kv_heads
        attended = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=piece.mask, scale=s.scale, enable_gqa=is_grouped
        )
        return attended.transpose(1, 2).flatten(0, 1)
