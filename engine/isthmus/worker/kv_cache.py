"""The KV pool in memory: how many blocks fit, their allocation, and moving blocks about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from isthmus.layers.env import AttentionGroups
from isthmus.platforms import AttentionBackend, Platform
from isthmus.platforms.attention import KVCache
from isthmus.scheduler.output import BlockOps
from isthmus.worker.block_groups import BlockGroups


class KVCachePool:
    """`caches[layer]`: the tensors of that layer's layout, zero-filled, so that masked positions are always finite.

    `host_caches`: the same in host memory, page-locked where the platform wants it. Both have so many usable blocks of
    each block group, and the null block.
    """

    def __init__(
        self,
        attention: AttentionGroups,
        groups: BlockGroups,
        num_blocks: Sequence[int],
        platform: Platform,
        device: torch.device,
        num_host_blocks: Sequence[int] = (),
    ) -> None:
        self._attention = attention
        self._group_of_layer = groups.of_layer()
        self._device = device
        self.num_host_blocks = tuple(num_host_blocks)
        # + the null block, on either side
        self.caches = tuple(
            tuple(platform.zeros(tensor.shape, tensor.dtype, device) for tensor in layout.tensors)
            for layout in groups.layouts([count + 1 for count in num_blocks])
        )
        self.host_caches = tuple(
            tuple(
                torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=platform.pin_memory)
                for tensor in layout.tensors
            )
            for layout in (groups.layouts([n + 1 for n in num_host_blocks]) if any(num_host_blocks) else ())
        )

    def apply(self, block_ops: Sequence[BlockOps]) -> None:
        """What an entry a block group asks for, before the forward.

        Raises ValueError for swaps where there is no host pool.
        """
        for group, ops in enumerate(block_ops):
            self._apply(group, ops)

    def _apply(self, group: int, ops: BlockOps) -> None:
        """Swap out, swap in, copy, in this order."""
        if (ops.swap_out or ops.swap_in) and not any(self.num_host_blocks):
            raise ValueError(f"{ops} asks for swaps, and this worker has no host pool; schedule copies only")
        if ops.swap_out:
            self._swap(group, self.caches, self.host_caches, ops.swap_out)
        if ops.swap_in:
            self._swap(group, self.host_caches, self.caches, ops.swap_in)
        if ops.copy:
            src, dst = (ids.to(self._device) for ids in torch.tensor(ops.copy, dtype=torch.int64).unbind(1))
            for layer, backend in self._layers(group):
                backend.copy_blocks(self.caches[layer], src, dst)

    def _swap(
        self, group: int, sources: tuple[KVCache, ...], targets: tuple[KVCache, ...], pairs: Sequence[tuple[int, int]]
    ) -> None:
        src, dst = torch.tensor(pairs, dtype=torch.int64).unbind(1)
        for layer, backend in self._layers(group):
            backend.swap_blocks(sources[layer], targets[layer], src, dst)

    def _layers(self, group: int) -> Iterator[tuple[int, AttentionBackend]]:
        """The layers of a block group, with their backends."""
        for layer, attention_group in enumerate(self._attention.layer_groups):
            if self._group_of_layer[layer] == group:
                yield layer, self._attention.backends[attention_group]
