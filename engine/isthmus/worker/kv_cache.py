"""The KV pool in memory: how many blocks fit, their allocation, and moving blocks about."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from isthmus.layers.env import AttentionGroups
from isthmus.platforms import KVCacheLayout, Platform
from isthmus.platforms.attention import KVCache
from isthmus.scheduler.output import BlockOps


def layer_layouts(groups: AttentionGroups, num_blocks: int) -> list[KVCacheLayout]:
    """The layout of every layer, for `num_blocks` blocks."""
    layouts = [backend.kv_cache_layout(num_blocks) for backend in groups.backends]
    return [layouts[group] for group in groups.layer_groups]


def bytes_per_block(groups: AttentionGroups) -> int:
    """Bytes that one block takes over all layers."""
    return sum(layout.nbytes for layout in layer_layouts(groups, 1))


class KVCachePool:
    """`caches[layer]`: the tensors of that layer's layout, zero-filled, so that masked positions are always finite.

    `host_caches`: the same for `num_host_blocks` blocks in host memory, page-locked where the platform wants it.
    """

    def __init__(
        self,
        groups: AttentionGroups,
        num_blocks: int,
        platform: Platform,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        self._groups = groups
        self._device = device
        self.num_host_blocks = num_host_blocks
        # + the null block, on either side
        self.caches = tuple(
            tuple(platform.zeros(tensor.shape, tensor.dtype, device) for tensor in layout.tensors)
            for layout in layer_layouts(groups, num_blocks + 1)
        )
        self.host_caches = tuple(
            tuple(
                torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=platform.pin_memory)
                for tensor in layout.tensors
            )
            for layout in (layer_layouts(groups, num_host_blocks + 1) if num_host_blocks else ())
        )

    def apply(self, ops: BlockOps) -> None:
        """Swap out, swap in, copy, in this order, before the forward.

        Raises ValueError for swaps where there is no host pool.
        """
        if (ops.swap_out or ops.swap_in) and not self.host_caches:
            raise ValueError(f"{ops} asks for swaps, and this worker has no host pool; schedule copies only")
        if ops.swap_out:
            self._swap(self.caches, self.host_caches, ops.swap_out)
        if ops.swap_in:
            self._swap(self.host_caches, self.caches, ops.swap_in)
        if ops.copy:
            src, dst = torch.tensor(ops.copy, dtype=torch.int64, device=self._device).unbind(1)
            for cache, group in zip(self.caches, self._groups.layer_groups, strict=True):
                self._groups.backends[group].copy_blocks(cache, src, dst)

    def _swap(
        self, sources: tuple[KVCache, ...], targets: tuple[KVCache, ...], pairs: Sequence[tuple[int, int]]
    ) -> None:
        src, dst = torch.tensor(pairs, dtype=torch.int64).unbind(1)
        for source, target, group in zip(sources, targets, self._groups.layer_groups, strict=True):
            self._groups.backends[group].swap_blocks(source, target, src, dst)
