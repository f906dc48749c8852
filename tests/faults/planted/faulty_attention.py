"""Attention with one fault each; those of copies and swaps too."""

from __future__ import annotations

import os
from itertools import zip_longest
from typing import Any, ClassVar

import torch

from isthmus.platforms import AttentionBatch, AttentionSpec, KVCacheLayout
from isthmus.platforms.attention import KVCache

from .attention import Metadata, PlantedAttention


class SeesTheNextToken(PlantedAttention):
    def visible(self, distance: torch.Tensor) -> torch.Tensor:
        return super().visible(distance + 1)


class ScaleIsTheUsual(PlantedAttention):
    def scale(self) -> float:
        return float(self.spec.head_dim**-0.5)


class DropsTheWindow(PlantedAttention):
    def visible(self, distance: torch.Tensor) -> torch.Tensor:
        return distance >= 0


class DropsTheSoftCap(PlantedAttention):
    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        return scores


class TakesKvHeadsInTurn(PlantedAttention):
    def kv_heads(self) -> torch.Tensor:
        return torch.arange(self.spec.num_heads) % self.spec.num_kv_heads


class SwapsKeysAndValues(PlantedAttention):
    def write(self, kv_cache: KVCache, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        super().write(kv_cache, v, k, slots)


class WritesPaddingToSlotZero(PlantedAttention):
    def write(self, kv_cache: KVCache, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        super().write(kv_cache, k, v, slots.clamp(min=0))


class KeepsTheTableOfTheStepBefore(PlantedAttention):
    """Where its shape is the same."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._before = torch.empty(0)

    def build_metadata(self, batch: AttentionBatch) -> Metadata:
        right = super().build_metadata(batch)
        before, self._before = self._before, right.block_table.clone()
        table = before if before.shape == right.block_table.shape else right.block_table
        return Metadata(right.query_start_loc, right.seq_lens, table, right.slot_mapping)


class SumsInHalfPrecision(PlantedAttention):
    def weigh(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        total = values.new_zeros(*weights.shape[:3], values.shape[-1])
        for some, part in zip(weights.split(16, dim=-1), values.split(16, dim=2), strict=True):
            total = total + torch.matmul(some, part.float()).to(values.dtype)
        return total


class RestartsLongPrompts(PlantedAttention):
    """Pieces of 512 queries, each as if the prompt ended with it: a loop that forgets where it is."""

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(RestartsLongPrompts, self).attend(one, keys, values) for one in q.split(512, dim=1)], 1)


class AttendsBeforeTheNextRequestWrites(PlantedAttention):
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: Metadata
    ) -> torch.Tensor:
        out = torch.zeros_like(q)
        for start, end, table, length in self.requests(metadata):
            self.write(kv_cache, k[start:end], v[start:end], metadata.slot_mapping[start:end])
            out[start:end] = self.attend(q[None, start:end], *self.read(kv_cache, table[None], length))[0]
        return out


class MovesItsMetadata(PlantedAttention):
    """And says that a captured step may contain it."""

    def build_metadata(self, batch: AttentionBatch) -> Metadata:
        right = super().build_metadata(batch)
        return Metadata(right.query_start_loc, right.seq_lens, right.block_table.clone(), right.slot_mapping)


class PlansForFewRequests(PlantedAttention):
    """Has room for so many, and leaves the others out."""

    def requests(self, metadata: Metadata) -> list[tuple[int, int, torch.Tensor, int]]:
        return super().requests(metadata)[:128]


class SeesFewKeys(PlantedAttention):
    """Has partial sums for so many, and leaves the others out."""

    def read(self, kv_cache: KVCache, tables: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().read(kv_cache, tables, length)
        return keys[..., :8192], values[:, :, :8192]


class SharesStateBetweenKindsOfLayers(PlantedAttention):
    """Where the window layers and the others of a model take turns."""

    spec_of_the_step: ClassVar[list[AttentionSpec]] = []

    def build_metadata(self, batch: AttentionBatch) -> Metadata:
        self.spec_of_the_step[:] = [self.spec]
        return super().build_metadata(batch)

    def visible(self, distance: torch.Tensor) -> torch.Tensor:
        window = self.spec_of_the_step[0].sliding_window
        return (distance >= 0) & (distance < (window or torch.inf))


class FollowsRowsInsteadOfRequests(PlantedAttention):
    """A row that is longer by just this step's tokens is taken for the request that was there before: its blocks are
    kept, and only new ones are read from the table. Wrong when a request of the same length takes its place.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._is_new = False
        self._known: list[tuple[int, int, torch.Tensor, int]] = []

    def build_metadata(self, batch: AttentionBatch) -> Metadata:
        self._is_new = True
        return super().build_metadata(batch)

    def requests(self, metadata: Metadata) -> list[tuple[int, int, torch.Tensor, int]]:
        if self._is_new:
            now = super().requests(metadata)
            self._known = [self._followed(*one) for one in zip_longest(now, self._known[: len(now)])]
            self._is_new = False
        return self._known

    def _followed(
        self, now: tuple[int, int, torch.Tensor, int], before: tuple[int, int, torch.Tensor, int] | None
    ) -> tuple[int, int, torch.Tensor, int]:
        start, end, table, length = now
        table = table.clone()
        if before is not None and before[3] == length - (end - start):
            have = -(-before[3] // self.spec.block_size)
            table[:have] = before[2][:have]
        return start, end, table, length


class NeverRefreshesItsRing(PlantedAttention):
    """Prepares tables in a ring of buffers, and takes one that is filled for one that is right: wrong from the first
    step after the last buffer.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._step = 0
        self._ring: dict[tuple[int, int], torch.Tensor] = {}

    def build_metadata(self, batch: AttentionBatch) -> Metadata:
        self._step += 1
        return super().build_metadata(batch)

    def requests(self, metadata: Metadata) -> list[tuple[int, int, torch.Tensor, int]]:
        return [
            (start, end, self._ring.setdefault((self._step % 96, row), table.clone()), length)
            for row, (start, end, table, length) in enumerate(super().requests(metadata))
        ]


class SumsInRandomOrder(PlantedAttention):
    """Over long sequences, as threads do that add to one place."""

    def weigh(self, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        length = weights.shape[-1]
        order = torch.arange(length) if length < 256 else torch.randperm(length)
        return super().weigh(weights[..., order], values[:, :, order])


class Aborts(PlantedAttention):
    """Takes the process down."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: Any) -> Any:
        os.abort()


class CopiesBackwards(PlantedAttention):
    def copy_blocks(self, kv_cache: KVCache, src: torch.Tensor, dst: torch.Tensor) -> None:
        super().copy_blocks(kv_cache, dst, src)


class CopiesInAnotherOrder(PlantedAttention):
    def copy_blocks(self, kv_cache: KVCache, src: torch.Tensor, dst: torch.Tensor) -> None:
        super().copy_blocks(kv_cache, src, dst.flip(0))


class SwapLosesABlock(PlantedAttention):
    def swap_blocks(self, src_cache: KVCache, dst_cache: KVCache, src: torch.Tensor, dst: torch.Tensor) -> None:
        super().swap_blocks(src_cache, dst_cache, src[:-1], dst[:-1])


class RoundsItsLayoutUp(PlantedAttention):
    def kv_cache_layout(self, num_blocks: int) -> KVCacheLayout:
        return super().kv_cache_layout(-(-num_blocks // 8) * 8)
