"""Paged attention on Intel GPUs: which backends are registered, and why the others are not."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from isthmus.platforms import AttentionBackend
from isthmus_xpu import packages
from isthmus_xpu.attention.ipex import IpexGpuAttentionBackend, IpexHostAttentionBackend
from isthmus_xpu.attention.sdpa import SdpaAttentionBackend
from isthmus_xpu.attention.vllm_xpu import VllmXpuAttentionBackend
from isthmus_xpu.packages import Installed

if TYPE_CHECKING:
    from isthmus.ops.registry import KernelRegistry

logger = logging.getLogger(__name__)

BACKENDS: Mapping[str, type[AttentionBackend]] = MappingProxyType(
    {
        packages.VLLM_XPU: VllmXpuAttentionBackend,
        packages.IPEX: IpexGpuAttentionBackend,
        packages.SDPA: SdpaAttentionBackend,
    }
)
"""Those of this package, by name; Triton's come from the engine."""


def register_gpu(registry: KernelRegistry, arch: str, device: Any, installed: Installed | None = None) -> None:
    """Add what can be used on an Intel GPU; the log says why the rest cannot.

    arch: as in `DeviceInfo`.  device: its `torch.xpu.get_device_properties`.
    """
    for name, problem in packages.problems(installed or Installed()).items():
        problem = problem or _problem_on(device, name)
        if problem is not None:
            logger.info("attention %s is not offered: %s", name, problem)
        elif name == packages.TRITON:
            kernels = importlib.import_module(packages.SHARED_TRITON)
            kernels.register_kernels(registry, arch, multiprocessors=device.gpu_subslice_count)
        else:
            registry.add_attention(BACKENDS[name])


def _problem_on(device: Any, name: str) -> str | None:
    """What shows only on the device, or when the package is imported."""
    if name == packages.VLLM_XPU:
        return VllmXpuAttentionBackend.import_problem()
    if name == packages.IPEX and not device.has_subgroup_2d_block_io:
        return f"{device.name} has no 2D block loads, without which ipex calls its own results inaccurate"
    return None


def register_host(registry: KernelRegistry, installed: Installed | None = None) -> None:
    """Add ipex for tensors of the host, where its CPU build is installed. It is used only when it is named."""
    if packages.ipex_problem(installed or Installed(), on_gpu=False) is None:
        registry.add_attention(IpexHostAttentionBackend)
