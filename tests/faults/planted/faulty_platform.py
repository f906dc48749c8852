"""Device, graph policy and collectives with one fault each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from isthmus.layers.env import ForwardContext
from isthmus.platforms import BatchShape, MemoryStats, TorchCommunicator

from .platform import PlantedGraph, PlantedPlatform


class MemoryStandsStill(PlantedPlatform):
    def memory_stats(self, device: torch.device, *, reset_peak: bool = False) -> MemoryStats:
        return MemoryStats(free=2**30, total=2**31, allocated=2**20, peak=2**20)


class PeakIsNeverReset(PlantedPlatform):
    _highest = 0

    def memory_stats(self, device: torch.device, *, reset_peak: bool = False) -> MemoryStats:
        found = super().memory_stats(device, reset_peak=reset_peak)
        self._highest = max(self._highest, found.peak)
        return replace(found, peak=self._highest)


class GivesALiveView(PlantedPlatform):
    def async_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: tensor


class GivesUsedMemory(PlantedPlatform):
    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(tuple(shape), 3, dtype=dtype, device=device)


class MisspellsAnArea(PlantedPlatform):
    unclaimed = MappingProxyType({"atention": "a slip of the pen"})


class ReplaysOldTokens(PlantedGraph):
    def record(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> Any:
        return super().record(input_ids.clone(), positions, ctx)


class PadsDown(PlantedGraph):
    def round_up(self, count: int) -> int:
        return max(count // self.granularity * self.granularity, 1)


class PadsBeyondTheLimits(PlantedGraph):
    """To sizes of its own, whatever the engine's are."""

    def padded(self, shape: BatchShape) -> BatchShape:
        self.max_tokens, self.max_reqs, self.granularity = 2**20, 2**20, 16
        return super().padded(shape)


class GathersInAnotherOrder(TorchCommunicator):
    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(super().all_gather(x, dim).chunk(self._spec.size, dim)[::-1], dim)


class Averages(TorchCommunicator):
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(x).div(self._spec.size).to(x.dtype)
