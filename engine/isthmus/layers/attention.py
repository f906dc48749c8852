"""The place of one attention layer in a step: its cache and its group's metadata."""

from __future__ import annotations

import torch
from torch import nn

from isthmus.layers.env import ForwardContext, ModelEnv
from isthmus.platforms import AttentionSpec


class Attention(nn.Module):
    """Paged attention over this rank's heads. Layers must be built in order: each takes the next cache.

    num_heads, num_kv_heads: this rank's.  scale: factor on q·k.  sliding_window: tokens visible, itself included;
    None = all.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        env: ModelEnv,
        *,
        scale: float,
        sliding_window: int | None = None,
    ) -> None:
        super().__init__()
        self.spec = AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=env.block_size,
            dtype=env.dtype,
            kv_cache_dtype=env.kv_cache_dtype,
            scale=scale,
            sliding_window=sliding_window,
        )
        self.layer, self.group, self.backend = env.attention.add_layer(self.spec)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """q [T, H, D], k and v [T, K, D] -> [T, H, D]; writes k and v to the cache."""
        return self.backend.forward(q, k, v, ctx.kv_caches[self.layer], ctx.metadata[self.group])
