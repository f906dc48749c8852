"""Device, graph policy and collectives with one fault each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from isthmus.layers.env import ForwardContext
from isthmus.platforms import BatchShape, MemoryStats, TorchCommunicator

from .platform import PlantedGraph, PlantedPlatform


class MemoryStandsStill(PlantedPlatform):
    def memory_stats(self, device: torch.device, *, reset_peak: bool = False) -> MemoryStats:
        return MemoryStats(free=2**30, total=2**31, allocated=2**20, peak=2**20)


class PeakIsNeverReset(PlantedPlatform):
    def memory_stats(self, device: torch.device, *, reset_peak: bool = False) -> MemoryStats:
        found = super().memory_stats(device, reset_peak=reset_peak)
        self._peak = max(getattr(self, "_peak", 0), found.peak)
        return replace(found, peak=self._peak)


class GivesALiveView(PlantedPlatform):
    def async_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: tensor


class GivesUsedMemory(PlantedPlatform):
    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(tuple(shape), 3, dtype=dtype, device=device)


class ClaimsNothingAtAll(PlantedPlatform):
    unclaimed = {"atention": "a slip of the pen"}  # noqa: RUF012


class ReplaysOldTokens(PlantedGraph):
    def record(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> Any:
        return super().record(input_ids.clone(), positions, ctx)


class OneGraphForAllNumbersOfRequests(PlantedGraph):
    """Replays a step of as many tokens, whoever they belonged to."""

    def pad(self, shape: BatchShape) -> BatchShape:
        padded = super().pad(shape)
        self.shape = BatchShape(padded.num_tokens, 0, 0)
        return padded


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


class CutsOffTheRest(TorchCommunicator):
    """Of a dimension that the group does not divide."""

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        size = self._spec.size
        return super().reduce_scatter(x.narrow(dim, 0, x.shape[dim] // size * size), dim)
