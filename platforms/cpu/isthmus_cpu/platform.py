"""The host CPU as a platform: native attention and ops, linear layers on prepacked weights."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from isthmus.platforms import DeviceInfo, MemoryStats, Platform
from isthmus.platforms.host_memory import host_memory_stats, read_memory
from isthmus_cpu.host import ROOT, read_cpu

if TYPE_CHECKING:
    from isthmus.config import EngineConfig


class CpuPlatform(Platform):
    """All cores and the memory of the host, within the limits of this process's cgroups."""

    name = "cpu"
    device_type = "cpu"
    profile_tokens = 256
    """A whole token budget takes seconds on a CPU, and activations grow linearly with the tokens."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root

    def device_info(self, index: int = 0) -> DeviceInfo:
        """bfloat16 comes first only where it has instructions of its own: elsewhere it is slower than float32."""
        cpu = read_cpu(self._root)
        fast, slow = ("bfloat16", "float32") if cpu.has_native_bfloat16 else ("float32", "bfloat16")
        arch = f"{cpu.machine}-{cpu.best_flag}" if cpu.best_flag else cpu.machine
        return DeviceInfo(cpu.name, arch, read_memory(self._root).total, (fast, slow, "float16"))

    def init_device(self, local_rank: int) -> torch.device:
        """Every rank shares the one CPU device."""
        return torch.device(self.device_type)

    def memory_stats(self, device: torch.device, *, reset_peak: bool = False) -> MemoryStats:
        """Resident memory of the whole process, see `host_memory_stats`."""
        return host_memory_stats(reset_peak=reset_peak, root=self._root)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Pages that the kernel gives, zeroed, when they are first touched: a pool costs the memory that it uses."""
        pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
        return torch.frombuffer(pages, dtype=dtype, count=math.prod(shape)).view(tuple(shape))

    def config_defaults(self, config: EngineConfig) -> Mapping[str, object]:
        """Half of the available memory, at most 4 GiB, for the cache: other programs live on this device."""
        return {
            "cache.block_size": 32,
            "cache.memory_fraction": 0.5,
            "cache.memory_cap_bytes": 4 * 2**30,
            # The host's memory is the device's: there is nowhere to swap to.
            "cache.swap_space_gib": 0.0,
            "scheduler.max_num_batched_tokens": 2048,
            "scheduler.max_num_seqs": 128,
        }

    def kernel_priority(self) -> Mapping[str, Sequence[str]]:
        return {"linear": ["onednn"]}
