"""Paged attention in plain torch, one request after the other: yours is another layout and another `forward`."""

from __future__ import annotations

import torch

from isthmus.platforms import AttentionBackend, AttentionBatch, AttentionSpec, CacheTensor, DeviceInfo, KVCacheLayout
from isthmus.platforms.attention import KVCache


class ToyAttentionBackend(AttentionBackend):
    """Cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], K and V of a block side by side."""

    name = "toy"

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        # What is declined here runs on native kernels, and the kit does not ask it.
        if spec.sliding_window is not None:
            return "toy has no sliding window"
        return "toy has neither sinks nor MLA" if spec.sinks or spec.mla_rank is not None else None

    def kv_cache_layout(self, num_blocks: int) -> KVCacheLayout:
        s = self.spec
        shape = (num_blocks, 2, s.num_kv_heads, s.block_size, s.head_dim)
        return KVCacheLayout((CacheTensor(shape, s.kv_cache_dtype, block_dim=0),))

    def build_metadata(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: AttentionBatch
    ) -> torch.Tensor:
        (cache,) = kv_cache
        real = metadata.slot_mapping >= 0  # -1 is padding
        slots = metadata.slot_mapping[real]
        new = torch.stack((k[real], v[real]), dim=1).to(cache.dtype)
        cache[slots // self.spec.block_size, :, :, slots % self.spec.block_size] = new
        out = torch.zeros_like(q)
        starts, seq_lens = metadata.query_start_loc_np.tolist(), metadata.seq_lens_np.tolist()
        for r in range(metadata.num_reqs):
            rows = slice(starts[r], starts[r + 1])
            out[rows] = self._attend(q[rows], cache, metadata.block_table[r], seq_lens[r])
        return out

    def _attend(self, q: torch.Tensor, cache: torch.Tensor, block_table: torch.Tensor, seq_len: int) -> torch.Tensor:
        """q [t, H, D], the last t of seq_len positions -> [t, H, D]"""
        s = self.spec
        blocks = cache[block_table[: -(-seq_len // s.block_size)].long()]
        kv = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len].float()
        keys, values = kv.repeat_interleave(s.num_heads // s.num_kv_heads, dim=1)
        scores = torch.einsum("thd,hpd->htp", q.float(), keys) * s.scale
        if s.soft_cap is not None:
            scores = s.soft_cap * torch.tanh(scores / s.soft_cap)
        position = torch.arange(seq_len, device=q.device)
        future = position > position[seq_len - len(q) :, None]
        return torch.einsum("htp,hpd->thd", scores.masked_fill(future, -torch.inf).softmax(-1), values).to(q.dtype)
