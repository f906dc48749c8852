"""The KV pool in memory: how many blocks fit, their allocation, and moving blocks about."""

from __future__ import annotations

import torch

from isthmus.layers.env import AttentionGroups
from isthmus.platforms import KVCacheLayout, Platform
from isthmus.scheduler.output import BlockOps


def layer_layouts(groups: AttentionGroups, num_blocks: int) -> list[KVCacheLayout]:
    """The layout of every layer, for `num_blocks` blocks."""
    layouts = [backend.kv_cache_layout(num_blocks) for backend in groups.backends]
    return [layouts[group] for group in groups.layer_groups]


def bytes_per_block(groups: AttentionGroups) -> int:
    """Bytes that one block takes over all layers."""
    return sum(layout.nbytes for layout in layer_layouts(groups, 1))


class KVCachePool:
    """`caches[layer]`: the tensors of that layer's layout, zero-filled, so that masked positions are always finite."""

    def __init__(self, groups: AttentionGroups, num_blocks: int, platform: Platform, device: torch.device) -> None:
        self._groups = groups
        self.caches = tuple(
            tuple(platform.zeros(tensor.shape, tensor.dtype, device) for tensor in layout.tensors)
            for layout in layer_layouts(groups, num_blocks + 1)  # + the null block
        )
        self._device = device

    def apply(self, ops: BlockOps) -> None:
        """Copies between blocks, before the forward. Raises ValueError for swaps: there is no host pool yet."""
        if ops.swap_out or ops.swap_in:
            raise ValueError(f"{ops} asks for swaps, and this worker has no host pool; schedule copies only")
        if ops.copy:
            src, dst = torch.tensor(ops.copy, dtype=torch.int64, device=self._device).unbind(1)
            for cache, group in zip(self.caches, self._groups.layer_groups, strict=True):
                self._groups.backends[group].copy_blocks(cache, src, dst)
