"""NVIDIA GPUs as a platform, through torch.cuda."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from isthmus.config.compile import EAGER, GRAPH
from isthmus.ops.triton import cache_dtypes
from isthmus.platforms import DeviceInfo, EagerBackend, GraphBackend
from isthmus.platforms.accelerator import TorchAcceleratorPlatform
from isthmus.platforms.captured_graph import decode_sizes
from isthmus_cuda.graph import CudaGraphBackend
from isthmus_cuda.probe import VISIBLE

if TYPE_CHECKING:
    from isthmus.config import EngineConfig

FIRST_WITH_BFLOAT16 = (8, 0)
"""Compute capability: Ampere."""
FIRST_WITH_TILE_COPIES = (9, 0)
"""Hopper, whose copy engine moves whole blocks: there a block is a tile of the kernel."""
TILE = 64
SMALL_BLOCK = 16


class CudaPlatform(TorchAcceleratorPlatform):
    """One GPU a rank."""

    name = "cuda"
    is_asynchronous = True
    device_type = "cuda"
    dist_backend = "nccl"
    visible_devices_env = VISIBLE
    ray_resource = "GPU"

    def device_info(self, index: int = 0) -> DeviceInfo:
        device = torch.cuda.get_device_properties(index)
        has_bfloat16 = (device.major, device.minor) >= FIRST_WITH_BFLOAT16
        dtypes = ("bfloat16", "float16", "float32") if has_bfloat16 else ("float16", "float32")
        arch = f"sm_{device.major}{device.minor}"
        return DeviceInfo(device.name, arch, device.total_memory, dtypes, cache_dtypes(arch))

    def config_defaults(self, config: EngineConfig) -> Mapping[str, object]:
        capability = torch.cuda.get_device_capability(config.device.index)
        return {
            "cache.block_size": TILE if capability >= FIRST_WITH_TILE_COPIES else SMALL_BLOCK,
            "scheduler.max_num_batched_tokens": 8192,
            "scheduler.max_num_seqs": 256,
            "compile.mode": GRAPH,
        }

    def kernel_priority(self) -> Mapping[str, Sequence[str]]:
        """What this repository verifies first; what is installed beside it, where that declines or by name."""
        return {"attention": ("triton", "flashinfer", "flash_attn"), "*": ("triton",)}

    def graph_backend(self, config: EngineConfig, device: torch.device) -> GraphBackend:
        if config.compile.mode == EAGER:
            return EagerBackend()
        return CudaGraphBackend(decode_sizes(config.scheduler.max_num_seqs))
