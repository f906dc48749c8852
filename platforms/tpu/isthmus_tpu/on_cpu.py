"""The platform without a TPU: XLA's CPU device runs the same programs. Never chosen silently, see `probe`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from isthmus.platforms import DeviceInfo, MemoryStats
from isthmus.platforms.host_memory import host_memory_stats, read_memory
from isthmus_tpu.platform import TpuPlatform

if TYPE_CHECKING:
    from isthmus.config import EngineConfig


class TpuOnCpuPlatform(TpuPlatform):
    """Small steps, so that the programs are compiled soon; memory as the host has it."""

    unclaimed = MappingProxyType({"speed": "how fast a CPU runs these programs says nothing about a TPU"})
    max_num_batched_tokens = 256
    max_num_seqs = 16

    def device_info(self, index: int = 0) -> DeviceInfo:
        if index != 0:
            raise IndexError(f"device {index}: XLA's CPU device is one, with index 0")
        return DeviceInfo("XLA:CPU in place of a TPU", "cpu", read_memory().total, ("float32", "bfloat16"))

    def memory_stats(self, device: torch.device, *, reset_peak: bool = False) -> MemoryStats:
        """Resident memory of the whole process, see `host_memory_stats`."""
        return host_memory_stats(reset_peak=reset_peak)

    def config_defaults(self, config: EngineConfig) -> Mapping[str, object]:
        """A cache that leaves the host's other programs alone; its zeros are touched at once."""
        return {
            **super().config_defaults(config),
            "cache.memory_fraction": 0.5,
            "cache.memory_cap_bytes": 2**30,
            # The host's memory is the device's: there is nowhere to swap to.
            "cache.swap_space_gib": 0.0,
        }
