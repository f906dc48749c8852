"""Intel GPUs as a platform, through torch.xpu."""

from __future__ import annotations

from collections.abc import Callable

import torch

from isthmus.platforms import DeviceInfo, MemoryStats, Platform
from isthmus_xpu.probe import VISIBLE


class XpuPlatform(Platform):
    """One GPU a rank. Kernels are native for now."""

    name = "xpu"
    is_asynchronous = True
    device_type = "xpu"
    dist_backend = "xccl"
    pin_memory = True
    visible_devices_env = VISIBLE
    ray_resource = "GPU"

    def device_info(self, index: int = 0) -> DeviceInfo:
        """`arch` is the driver's device id, the one stable key that every driver version reports."""
        device = torch.xpu.get_device_properties(index)
        has_matrix_units = device.has_subgroup_matrix_multiply_accumulate
        dtypes = ("bfloat16", "float16", "float32") if has_matrix_units else ("float16", "float32")
        return DeviceInfo(device.name, f"0x{device.device_id:04x}", device.total_memory, dtypes)

    def init_device(self, local_rank: int) -> torch.device:
        device = torch.device(self.device_type, local_rank)
        torch.xpu.set_device(device)
        return device

    def memory_stats(self, device: torch.device, *, reset_peak: bool = False) -> MemoryStats:
        """`free` counts what torch's allocator holds but does not use; `allocated` and `peak` are tensors only."""
        free, total = torch.xpu.mem_get_info(device)
        allocated = torch.xpu.memory_allocated(device)
        unused = torch.xpu.memory_reserved(device) - allocated
        stats = MemoryStats(free + unused, total, allocated, torch.xpu.max_memory_allocated(device))
        if reset_peak:
            torch.xpu.reset_peak_memory_stats(device)
        return stats

    def synchronize(self, device: torch.device) -> None:
        torch.xpu.synchronize(device)

    def release_cached_memory(self, device: torch.device) -> None:
        torch.xpu.empty_cache()

    def async_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        copied = torch.xpu.Event()
        copied.record()

        def wait() -> torch.Tensor:
            copied.synchronize()
            return host

        return wait
