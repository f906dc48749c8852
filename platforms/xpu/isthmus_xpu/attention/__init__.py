"""Paged attention on Intel GPUs: which backends are registered, and why the others are not."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from isthmus.ops.triton import register_kernels
from isthmus.ops.triton.arch import NO_FAMILY, Arch
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
SMALLEST_LOCAL_MEMORY = 65536
"""Bytes that a work group has on every GPU since Xe; for a torch that does not tell."""


def register_gpu(registry: KernelRegistry, arch: str, device: Any, installed: Installed | None = None) -> None:
    """Add what can be used on an Intel GPU; the log says why the rest cannot.

    arch: as in `DeviceInfo`.  device: its `torch.xpu.get_device_properties`.
    """
    for name, problem in packages.problems(installed or Installed()).items():
        problem = problem or _problem_on(device, name)
        if problem is not None:
            logger.info("attention %s is not offered: %s", name, problem)
        elif name == packages.TRITON:
            register_kernels(
                registry, arch, multiprocessors=device.gpu_subslice_count, facts=triton_facts(arch, device)
            )
        else:
            registry.add_attention(BACKENDS[name])


def triton_facts(arch: str, device: Any) -> Arch:
    """What the shared kernels go by, as the device says it. No tuning row is for it, so the safe one is taken.

    The widest wave is assumed: a program has fewer threads than it may have rather than more. No cache of 8 bits: which
    conversions Triton has for Intel GPUs was not tried.
    """
    return Arch(
        name=arch,
        family=NO_FAMILY,
        shared_bytes=getattr(device, "local_mem_size", SMALLEST_LOCAL_MEMORY),
        wave_size=max(device.sub_group_sizes),
        fp8_kv=(),
        multiprocessors=device.gpu_subslice_count,
    )


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
