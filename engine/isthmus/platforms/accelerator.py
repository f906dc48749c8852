"""What platforms have in common whose devices torch drives itself: streams, events, a caching allocator."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from isthmus.platforms.facts import MemoryStats
from isthmus.platforms.interface import Platform

logger = logging.getLogger(__name__)

_GIB = 2**30
_CONTEXT_BYTES = 2 * _GIB
"""What is taken of a device beside this process's tensors before it looks like somebody else's: contexts and kernels
take up to 1 GiB.
"""
_DEFAULT_POOL = (0, 0)
"""The allocator's id of the memory that belongs to no captured graph."""


class TorchAcceleratorPlatform(Platform):
    """A platform through torch's own module for `device_type`. `device_info` is left to the platform.

    The module must have set_device, synchronize, empty_cache, mem_get_info, the memory_* functions of the caching
    allocator, streams and events.
    """

    pin_memory = True

    def __init__(self) -> None:
        self._copy_streams: dict[torch.device, Any] = {}

    @property
    def torch_module(self) -> Any:
        """torch's module of the device type."""
        return getattr(torch, self.device_type)

    def init_device(self, local_rank: int) -> torch.device:
        device = torch.device(self.device_type, local_rank)
        self.torch_module.set_device(device)
        self._warn_of_others(device)
        return device

    def _warn_of_others(self, device: torch.device) -> None:
        free, total = self._free_and_total(device)
        taken = total - free - self.torch_module.memory_reserved(device)
        if taken > _CONTEXT_BYTES:
            logger.warning(
                "%s: %.1f of %.1f GiB are in use by others; the KV cache is sized from the rest, and there will be no "
                "room if they take more",
                device,
                taken / _GIB,
                total / _GIB,
            )

    def memory_stats(self, device: torch.device, *, reset_peak: bool = False) -> MemoryStats:
        """`free` counts what torch's allocator can give back; `allocated` and `peak` are tensors only."""
        module = self.torch_module
        free, total = self._free_and_total(device)
        stats = MemoryStats(
            free=free + self._unused(device),
            total=total,
            allocated=module.memory_allocated(device),
            peak=module.max_memory_allocated(device),
        )
        if reset_peak:
            module.reset_peak_memory_stats(device)
        return stats

    def _free_and_total(self, device: torch.device) -> tuple[int, int]:
        """Bytes of the whole device, other programs' share taken off `free`."""
        free, total = self.torch_module.mem_get_info(device)
        return free, total

    def _unused(self, device: torch.device) -> int:
        """Bytes of segments without a tensor. Those of captured graphs do not count: a replay needs them."""
        return sum(
            segment["total_size"]
            for segment in self.torch_module.memory_snapshot()
            if segment["device"] == device.index
            and segment["active_size"] == 0
            and tuple(segment["segment_pool_id"]) == _DEFAULT_POOL
        )

    def synchronize(self, device: torch.device) -> None:
        self.torch_module.synchronize(device)

    def release_cached_memory(self, device: torch.device) -> None:
        self.torch_module.empty_cache()

    def async_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Into page-locked memory, on a stream of its own: kernels that are queued later do not wait for the copy.

        What is copied is a snapshot, so they may overwrite `tensor`.
        """
        module = self.torch_module
        snapshot = tensor.clone()
        stream = self._copy_stream(tensor.device)
        stream.wait_stream(module.current_stream(tensor.device))
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copied = module.Event()
        with module.stream(stream):
            host.copy_(snapshot, non_blocking=True)
            copied.record(stream)
        snapshot.record_stream(stream)

        def wait() -> torch.Tensor:
            copied.synchronize()
            return host

        return wait

    def _copy_stream(self, device: torch.device) -> Any:
        if device not in self._copy_streams:
            self._copy_streams[device] = self.torch_module.Stream(device)
        return self._copy_streams[device]
