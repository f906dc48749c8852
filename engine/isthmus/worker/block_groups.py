"""Which attention layers share blocks: those that see all of a sequence, and those that see the same window of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.layers.env import AttentionGroups
from isthmus.platforms import KVCacheLayout
from isthmus.scheduler.output import GroupLimits


@dataclass(frozen=True, slots=True)
class BlockGroupLayout:
    """window: as in `GroupLimits`.  bytes_per_block: over the layers of the group."""

    window: int | None
    bytes_per_block: int


class BlockGroups:
    """The block groups of a model, the one without a window first. A model without attention has one, of no bytes.

    of_attention: attention group -> block group.  A window that no sequence can outgrow is none.
    """

    def __init__(self, attention: AttentionGroups, max_model_len: int) -> None:
        self._attention = attention
        windows = [_effective(spec.sliding_window, max_model_len) for spec in attention.specs]
        distinct = sorted(set(windows) or {None}, key=lambda window: (window is not None, window or 0))
        self.of_attention = [distinct.index(window) for window in windows]
        self.groups = [BlockGroupLayout(window, self._bytes_per_block(index)) for index, window in enumerate(distinct)]

    def __len__(self) -> int:
        return len(self.groups)

    def of_layer(self) -> list[int]:
        """Layer -> block group."""
        return [self.of_attention[group] for group in self._attention.layer_groups]

    def layouts(self, num_blocks: Sequence[int]) -> list[KVCacheLayout]:
        """The layout of every layer, for so many blocks of each block group."""
        backends = self._attention.backends
        return [
            backends[group].kv_cache_layout(num_blocks[self.of_attention[group]])
            for group in self._attention.layer_groups
        ]

    def _bytes_per_block(self, block_group: int) -> int:
        backends = self._attention.backends
        layers = [group for group in self._attention.layer_groups if self.of_attention[group] == block_group]
        return sum(backends[group].kv_cache_layout(1).nbytes for group in layers)

    def nbytes(self, num_blocks: Sequence[int]) -> int:
        """Memory of so many blocks of each group."""
        return sum(group.bytes_per_block * count for group, count in zip(self.groups, num_blocks, strict=True))

    def counts(self, num_blocks: int, useful: Sequence[int | None]) -> list[int]:
        """`num_blocks` of each group, or fewer where fewer are of use; None = more always are."""
        return [num_blocks if limit is None else min(num_blocks, limit) for limit in useful]

    def share(self, budget_bytes: int, most: int, useful: Sequence[int | None]) -> list[int]:
        """Blocks of each group that a budget pays for, at most `most`, and never more than are of use.

        All groups grow alike until those with a window have what they can use; the rest goes to the others.
        """
        limits = self.counts(most, useful)
        counts = [0] * len(self.groups)
        left = budget_bytes
        for level in sorted(set(limits)):
            growing = [index for index, limit in enumerate(limits) if limit >= level]
            price = sum(self.groups[index].bytes_per_block for index in growing)
            step = min(level - counts[growing[0]], left // price if price else level)
            for index in growing:
                counts[index] += step
            left -= step * price
        return counts

    def limits(self, num_blocks: Sequence[int], num_host_blocks: Sequence[int]) -> tuple[GroupLimits, ...]:
        """For the scheduler."""
        return tuple(
            GroupLimits(blocks, host, group.window)
            for group, blocks, host in zip(self.groups, num_blocks, num_host_blocks, strict=True)
        )


def _effective(window: int | None, max_model_len: int) -> int | None:
    return None if window is None or window >= max_model_len else window
