"""NVIDIA GPUs as a platform, through torch.cuda."""

from __future__ import annotations

from collections.abc import Callable

import torch

from isthmus.platforms import DeviceInfo, MemoryStats, Platform
from isthmus_cuda.probe import VISIBLE

_FIRST_WITH_BFLOAT16 = 8
"""Major compute capability: Ampere."""


class CudaPlatform(Platform):
    """One GPU a rank. Kernels are native for now."""

    name = "cuda"
    is_asynchronous = True
    device_type = "cuda"
    dist_backend = "nccl"
    pin_memory = True
    visible_devices_env = VISIBLE
    ray_resource = "GPU"

    def device_info(self, index: int = 0) -> DeviceInfo:
        device = torch.cuda.get_device_properties(index)
        has_bfloat16 = device.major >= _FIRST_WITH_BFLOAT16
        dtypes = ("bfloat16", "float16", "float32") if has_bfloat16 else ("float16", "float32")
        return DeviceInfo(device.name, f"sm_{device.major}{device.minor}", device.total_memory, dtypes)

    def init_device(self, local_rank: int) -> torch.device:
        device = torch.device(self.device_type, local_rank)
        torch.cuda.set_device(device)
        return device

    def memory_stats(self, device: torch.device, *, reset_peak: bool = False) -> MemoryStats:
        """`free` counts what torch's allocator holds but does not use; `allocated` and `peak` are tensors only."""
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        unused = torch.cuda.memory_reserved(device) - allocated
        stats = MemoryStats(free + unused, total, allocated, torch.cuda.max_memory_allocated(device))
        if reset_peak:
            torch.cuda.reset_peak_memory_stats(device)
        return stats

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def release_cached_memory(self, device: torch.device) -> None:
        torch.cuda.empty_cache()

    def async_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def wait() -> torch.Tensor:
            copied.synchronize()
            return host

        return wait
