"""Plugin entry point of the rocm platform, and of its kernels on a host without one. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from isthmus.ops.triton import probe_interpreter, register_kernels
from isthmus.plugins import PlatformEntry, hookimpl
from isthmus_rocm.probe import probe

if TYPE_CHECKING:
    from isthmus.ops.registry import KernelRegistry
    from isthmus.platforms import Platform

INTERPRETED = "rocm_interpret"
INTERPRETED_ARCH = "gfx942"


@hookimpl
def isthmus_platforms() -> Sequence[PlatformEntry]:
    return [
        PlatformEntry("rocm", probe, _load),
        PlatformEntry(INTERPRETED, partial(probe_interpreter, INTERPRETED_ARCH), _load_interpreted),
    ]


@hookimpl
def isthmus_register_kernels(registry: KernelRegistry, platform: Platform) -> None:
    if platform.name == INTERPRETED:
        register_kernels(registry, INTERPRETED_ARCH, interpreted=True)
    elif platform.name == "rocm":
        import torch

        from isthmus_rocm import providers

        device = torch.cuda.current_device()
        count = torch.cuda.get_device_properties(device).multi_processor_count
        register_kernels(registry, platform.device_info(device).arch, multiprocessors=count)
        providers.register(registry)


def _load() -> Platform:
    from isthmus_rocm.platform import RocmPlatform

    return RocmPlatform()


def _load_interpreted() -> Platform:
    from isthmus.ops.triton.interpreted import InterpretedPlatform

    return InterpretedPlatform(INTERPRETED, INTERPRETED_ARCH)
