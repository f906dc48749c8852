"""Plugin entry point of the cpu platform. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isthmus.plugins import PlatformEntry, hookimpl
from isthmus_cpu.probe import probe

if TYPE_CHECKING:
    from isthmus.ops.registry import KernelRegistry
    from isthmus.platforms import Platform


@hookimpl
def isthmus_platforms() -> Sequence[PlatformEntry]:
    return [PlatformEntry("cpu", probe, _load)]


@hookimpl
def isthmus_register_kernels(registry: KernelRegistry, platform: Platform) -> None:
    from isthmus_cpu.linear import OneDnnLinearBackend
    from isthmus_cpu.platform import CpuPlatform

    if isinstance(platform, CpuPlatform):
        registry.add_linear(OneDnnLinearBackend)


def _load() -> Platform:
    from isthmus_cpu.platform import CpuPlatform

    return CpuPlatform()
