"""AMD GPUs as a platform. torch's ROCm build speaks HIP under the name torch.cuda."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from isthmus.config.compile import EAGER, GRAPH
from isthmus.ops.triton import cache_dtypes
from isthmus.platforms import DeviceInfo, EagerBackend, GraphBackend
from isthmus.platforms.accelerator import TorchAcceleratorPlatform
from isthmus.platforms.captured_graph import decode_sizes
from isthmus_rocm.graph import HipGraphBackend
from isthmus_rocm.probe import HIP_VISIBLE

if TYPE_CHECKING:
    from isthmus.config import EngineConfig

WIDE_WAVE = 64
"""Threads of a wave of the data-centre parts (CDNA); the others (RDNA) have half of it."""
LARGE_BLOCK, SMALL_BLOCK = 64, 16


class RocmPlatform(TorchAcceleratorPlatform):
    """One GPU a rank."""

    name = "rocm"
    is_asynchronous = True
    device_type = "cuda"
    dist_backend = "nccl"
    """torch's name for RCCL as well."""
    visible_devices_env = HIP_VISIBLE
    ray_resource = "GPU"

    def device_info(self, index: int = 0) -> DeviceInfo:
        """`arch` is the ISA without its feature suffixes, e.g. "gfx942" of "gfx942:sramecc+:xnack-"."""
        device = torch.cuda.get_device_properties(index)
        arch = device.gcnArchName.split(":")[0]
        dtypes = ("bfloat16", "float16", "float32")
        return DeviceInfo(device.name, arch, device.total_memory, dtypes, cache_dtypes(arch))

    def config_defaults(self, config: EngineConfig) -> Mapping[str, object]:
        """Large blocks where the kernel's tiles are large: fewer look-ups in the block table."""
        wave = torch.cuda.get_device_properties(config.device.index).warp_size
        return {
            "cache.block_size": LARGE_BLOCK if wave == WIDE_WAVE else SMALL_BLOCK,
            "scheduler.max_num_batched_tokens": 8192,
            "scheduler.max_num_seqs": 256,
            "compile.mode": GRAPH,
        }

    def kernel_priority(self) -> Mapping[str, Sequence[str]]:
        """What this repository verifies first; what is installed beside it, where that declines or by name."""
        return {"attention": ("triton", "aiter"), "*": ("triton",)}

    def graph_backend(self, config: EngineConfig, device: torch.device) -> GraphBackend:
        if config.compile.mode == EAGER:
            return EagerBackend()
        return HipGraphBackend(decode_sizes(config.scheduler.max_num_seqs))
