"""Google TPUs as a platform, through torch_xla."""

from __future__ import annotations

import torch
import torch_xla
from torch_xla.core import xla_model

from isthmus.platforms import DeviceInfo, MemoryStats, Platform
from isthmus_tpu.chips import tpu_generations
from isthmus_tpu.probe import VISIBLE


class TpuPlatform(Platform):
    """One chip a rank. Kernels are native for now, and steps run lazily: nothing is padded or compiled ahead."""

    name = "tpu"
    is_asynchronous = True
    device_type = "xla"
    dist_backend = "xla"
    visible_devices_env = VISIBLE
    ray_resource = "TPU"

    def device_info(self, index: int = 0) -> DeviceInfo:
        """Asks the runtime for the memory limit, since PCI does not tell it."""
        generation = tpu_generations()[index]
        limit = int(xla_model.get_memory_info(torch_xla.device(index))["bytes_limit"])
        return DeviceInfo(f"TPU {generation}", generation, limit, ("bfloat16", "float32"))

    def init_device(self, local_rank: int) -> torch.device:
        return torch_xla.device(local_rank)

    def memory_stats(self, device: torch.device, *, reset_peak: bool = False) -> MemoryStats:
        """`peak` is that of the whole process: the runtime cannot start it again, so `reset_peak` has no effect."""
        info = xla_model.get_memory_info(device)
        used, limit = int(info["bytes_used"]), int(info["bytes_limit"])
        return MemoryStats(limit - used, limit, used, int(info.get("peak_bytes_used", used)))

    def synchronize(self, device: torch.device) -> None:
        torch_xla.sync(wait=True)
