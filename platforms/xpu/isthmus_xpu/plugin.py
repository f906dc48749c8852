"""Plugin entry point of the xpu platform, and of IPEX's kernels on the host. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isthmus.plugins import PlatformEntry, hookimpl
from isthmus_xpu.probe import probe

if TYPE_CHECKING:
    from isthmus.ops.registry import KernelRegistry
    from isthmus.platforms import Platform


@hookimpl
def isthmus_platforms() -> Sequence[PlatformEntry]:
    return [PlatformEntry("xpu", probe, _load)]


@hookimpl
def isthmus_register_kernels(registry: KernelRegistry, platform: Platform) -> None:
    if platform.name == "xpu":
        import torch

        from isthmus_xpu.attention import register_gpu

        index = torch.xpu.current_device()
        register_gpu(registry, platform.device_info(index).arch, torch.xpu.get_device_properties(index))
    elif platform.name == "cpu":
        from isthmus_xpu.attention import register_host

        register_host(registry)


def _load() -> Platform:
    from isthmus_xpu.platform import XpuPlatform

    XpuPlatform.check_available()
    return XpuPlatform()
