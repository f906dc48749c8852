"""The three answers that every platform must give, and what it proposes and prefers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from isthmus.config import EngineConfig
from isthmus.platforms import DeviceInfo, MemoryStats, Platform
from isthmus.platforms.host_memory import host_memory_stats, read_memory


class ToyPlatform(Platform):
    name = "toy"
    device_type = "cpu"  # yours: torch's name of the device type

    def device_info(self, index: int = 0) -> DeviceInfo:
        # Yours: the facts of device `index`, without binding to it; the preferred dtype first.
        return DeviceInfo("Toy 1", arch="toy1", total_bytes=read_memory().total, dtypes=("float32", "bfloat16"))

    def init_device(self, local_rank: int) -> torch.device:
        return torch.device(self.device_type)  # yours: with `local_rank` as its index

    def memory_stats(self, device: torch.device, *, reset_peak: bool = False) -> MemoryStats:
        return host_memory_stats(reset_peak=reset_peak)  # yours: what the device's allocator says

    def config_defaults(self, config: EngineConfig) -> Mapping[str, object]:
        return {"cache.memory_cap_bytes": 2**28}  # yours: nothing; a device of its own may be filled

    def kernel_priority(self) -> Mapping[str, Sequence[str]]:
        return {"attention": ["toy"]}
