"""Paged attention in plain torch: the definition of attention, the fallback, and the oracle for every other backend.

Decodes (one query token) run as a few padded batches: requests of similar length share a bucket, their blocks are
gathered once into a workspace, and the query heads of one kv head become the rows of one small matrix, so that keys
and values are never repeated. Longer queries run request by request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from isthmus.platforms.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    CacheTensor,
    GraphSupport,
    KVCache,
    KVCacheLayout,
)
from isthmus.platforms.facts import DeviceInfo

BUCKET_FILL = 0.7
"""A request joins a decode bucket if it fills at least this share of the bucket's blocks."""
MAX_QUERY_ROWS = 512
"""Longer masked queries run in pieces of this many rows, so that the mask stays small."""


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """`tokens` [r] int64: places in the batch.  `blocks` [r * b] int64.  `mask` [r, 1, 1, b * block_size] additive."""

    tokens: torch.Tensor
    blocks: torch.Tensor
    mask: torch.Tensor
    num_reqs: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens [start, end) of the batch, which sit at sequence positions [first_key + offset, ...).

    `blocks` [b] int64 hold the visible keys, the first of them at sequence position `first_key`; None if the chunk
    is a whole prompt and its keys are in k and v themselves.
    """

    start: int
    end: int
    offset: int
    num_keys: int
    blocks: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class NativeMetadata:
    """`written` [W] int64: the tokens whose slot is not -1 (None = all T), `slots` [W] int64 their slots."""

    slots: torch.Tensor
    written: torch.Tensor | None
    decode: tuple[DecodeBucket, ...]
    prefill: tuple[PrefillChunk, ...]


class NativeAttentionBackend(AttentionBackend):
    """Cache: K and V apart, each [num_blocks, block_size, num_kv_heads, head_dim]."""

    name: ClassVar[str] = "native"
    graph_support: ClassVar[GraphSupport] = GraphSupport.NEVER

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._workspace = torch.empty(0, dtype=spec.kv_cache_dtype, device=device)

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        if spec.mla_rank is not None:
            return "native has no MLA"
        if spec.sinks:
            return "native has no attention sinks"
        if spec.kv_cache_dtype.itemsize == 1:
            return f"native has caches of compute dtypes, not of {spec.kv_cache_dtype}"
        return None

    def kv_cache_layout(self, num_blocks: int) -> KVCacheLayout:
        s = self.spec
        one = CacheTensor((num_blocks, s.block_size, s.num_kv_heads, s.head_dim), s.kv_cache_dtype, block_dim=0)
        return KVCacheLayout((one, one))

    def build_metadata(self, batch: AttentionBatch) -> NativeMetadata:
        starts, lens = batch.query_start_loc_np[: batch.num_reqs + 1], batch.seq_lens_np[: batch.num_reqs]
        table = batch.block_table[: batch.num_reqs].cpu().numpy()
        query_lens = np.diff(starts)
        slots = batch.slot_mapping
        written = None
        if bool((slots < 0).any()):
            written = (slots >= 0).nonzero(as_tuple=True)[0]
            slots = slots[written]
        return NativeMetadata(
            slots=slots,
            written=written,
            decode=tuple(self._decode_buckets(np.flatnonzero(query_lens == 1), starts, lens, table)),
            prefill=tuple(self._chunk(r, starts, lens, table) for r in np.flatnonzero(query_lens > 1).tolist()),
        )

    def _first_block(self, first_query: np.ndarray | int) -> np.ndarray | int:
        """Index in the block table of the first block that a query at this position may see."""
        window = self.spec.sliding_window
        if window is None:
            return first_query * 0
        return np.maximum(first_query - window + 1, 0) // self.spec.block_size

    def _decode_buckets(
        self, reqs: np.ndarray, starts: np.ndarray, lens: np.ndarray, table: np.ndarray
    ) -> list[DecodeBucket]:
        """Cut the decoding requests, longest first, where the next one would leave too much of its row empty."""
        size = self.spec.block_size
        first = np.asarray(self._first_block(lens[reqs] - 1))
        count = -(-lens[reqs] // size) - first
        order = np.argsort(-count, kind="stable")
        buckets = []
        at = 0
        while at < len(order):
            width = int(count[order[at]])
            end = at + 1
            while end < len(order) and count[order[end]] >= BUCKET_FILL * width:
                end += 1
            pick = order[at:end]
            buckets.append(self._bucket(reqs[pick], first[pick], width, starts, lens, table))
            at = end
        return buckets

    def _bucket(
        self, reqs: np.ndarray, first: np.ndarray, width: int, starts: np.ndarray, lens: np.ndarray, table: np.ndarray
    ) -> DecodeBucket:
        spec = self.spec
        columns = first[:, None] + np.arange(width)
        inside = columns * spec.block_size < lens[reqs, None]
        blocks = np.where(inside, table[reqs[:, None], np.minimum(columns, table.shape[1] - 1)], 0)
        keys = first[:, None] * spec.block_size + np.arange(width * spec.block_size)
        visible = keys < lens[reqs, None]
        if spec.sliding_window is not None:
            visible &= keys > lens[reqs, None] - 1 - spec.sliding_window
        mask = np.where(visible, np.float32(0), np.float32(-np.inf))
        to = self.device
        return DecodeBucket(
            tokens=torch.from_numpy(starts[reqs].astype(np.int64)).to(to),
            blocks=torch.from_numpy(blocks.reshape(-1).astype(np.int64)).to(to),
            mask=torch.from_numpy(mask)[:, None, None, :].to(to, spec.dtype),
            num_reqs=len(reqs),
        )

    def _chunk(self, req: int, starts: np.ndarray, lens: np.ndarray, table: np.ndarray) -> PrefillChunk:
        start, end, length = int(starts[req]), int(starts[req + 1]), int(lens[req])
        computed = length - (end - start)
        if computed == 0:
            return PrefillChunk(start, end, offset=0, num_keys=length, blocks=None)
        size = self.spec.block_size
        first = int(self._first_block(computed))
        blocks = torch.from_numpy(table[req, first : -(-length // size)].astype(np.int64)).to(self.device)
        return PrefillChunk(start, end, computed - first * size, length - first * size, blocks)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: NativeMetadata
    ) -> torch.Tensor:
        key_cache, value_cache = kv_cache
        self._write(key_cache, k, metadata)
        self._write(value_cache, v, metadata)
        out = torch.empty_like(q)
        if metadata.written is not None:
            out.zero_()
        for bucket in metadata.decode:
            self._decode(q, key_cache, value_cache, bucket, out)
        for chunk in metadata.prefill:
            self._prefill(q, k, v, key_cache, value_cache, chunk, out)
        return out

    def _write(self, cache: torch.Tensor, x: torch.Tensor, metadata: NativeMetadata) -> None:
        source = x if metadata.written is None else x[metadata.written]
        cache.view(-1, *cache.shape[2:]).index_copy_(0, metadata.slots, source.to(cache.dtype))

    def _gather(
        self, key_cache: torch.Tensor, value_cache: torch.Tensor, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks of both caches, [len(blocks) * block_size, K, D] each, in the workspace that all layers share."""
        shape = (len(blocks), *key_cache.shape[1:])
        half = math.prod(shape)
        if self._workspace.numel() < 2 * half:
            self._workspace = torch.empty(2 * half, dtype=key_cache.dtype, device=key_cache.device)
        keys, values = self._workspace[:half].view(shape), self._workspace[half : 2 * half].view(shape)
        torch.index_select(key_cache, 0, blocks, out=keys)
        torch.index_select(value_cache, 0, blocks, out=values)
        return keys.flatten(0, 1).to(self.spec.dtype), values.flatten(0, 1).to(self.spec.dtype)

    def _decode(
        self,
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        bucket: DecodeBucket,
        out: torch.Tensor,
    ) -> None:
        s, r = self.spec, bucket.num_reqs
        keys, values = self._gather(key_cache, value_cache, bucket.blocks)
        rows = q.index_select(0, bucket.tokens).view(r, s.num_kv_heads, s.num_heads // s.num_kv_heads, s.head_dim)
        keys = keys.view(r, -1, s.num_kv_heads, s.head_dim).transpose(1, 2)
        values = values.view(r, -1, s.num_kv_heads, s.head_dim).transpose(1, 2)
        attended = self._attend(rows, keys, values, bucket.mask)
        out.index_copy_(0, bucket.tokens, attended.reshape(r, s.num_heads, s.head_dim))

    def _prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        chunk: PrefillChunk,
        out: torch.Tensor,
    ) -> None:
        s = self.spec
        query = q[chunk.start : chunk.end].transpose(0, 1)[None]
        if chunk.blocks is None:
            keys, values = k[chunk.start : chunk.end], v[chunk.start : chunk.end]
        else:
            keys, values = self._gather(key_cache, value_cache, chunk.blocks)
        keys = keys[: chunk.num_keys].transpose(0, 1)[None]
        values = values[: chunk.num_keys].transpose(0, 1)[None]
        whole = chunk.offset == 0 and (s.sliding_window is None or chunk.num_keys <= s.sliding_window)
        if whole and s.soft_cap is None:
            attended = F.scaled_dot_product_attention(
                query, keys, values, is_causal=True, scale=s.scale, enable_gqa=s.num_heads != s.num_kv_heads
            )
            out[chunk.start : chunk.end] = attended[0].transpose(0, 1)
            return
        group = s.num_heads // s.num_kv_heads
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        for at in range(0, chunk.end - chunk.start, MAX_QUERY_ROWS):
            piece = query[:, :, at : at + MAX_QUERY_ROWS]
            mask = self._causal_mask(chunk.offset + at, piece.shape[2], chunk.num_keys)
            attended = self._attend(piece, keys, values, mask)
            out[chunk.start + at : chunk.start + at + piece.shape[2]] = attended[0].transpose(0, 1)

    def _causal_mask(self, first_query: int, num_queries: int, num_keys: int) -> torch.Tensor:
        """Additive [num_queries, num_keys]; query row i sits at key position first_query + i."""
        distance = torch.arange(first_query, first_query + num_queries, device=self.device)[:, None]
        distance = distance - torch.arange(num_keys, device=self.device)
        visible = distance >= 0
        if self.spec.sliding_window is not None:
            visible &= distance < self.spec.sliding_window
        mask = torch.zeros(visible.shape, dtype=self.spec.dtype, device=self.device)
        return mask.masked_fill_(~visible, -torch.inf)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """softmax(scale * q k^T + mask) v over [..., queries, D] and [..., keys, D]."""
        s = self.spec
        if s.soft_cap is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=s.scale)
        scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * s.scale
        scores = s.soft_cap * torch.tanh(scores / s.soft_cap) + mask
        return torch.matmul(scores.softmax(-1), v.float()).to(q.dtype)
