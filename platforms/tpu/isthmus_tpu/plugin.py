"""Plugin entry point of the tpu platform. Imports nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from isthmus.plugins import PlatformEntry, hookimpl
from isthmus_tpu.probe import RUNTIME, probe, wants_cpu

PROVIDER = "xla"
"""Of ops."""

if TYPE_CHECKING:
    from isthmus.ops.registry import KernelRegistry
    from isthmus.platforms import Platform


@hookimpl
def isthmus_platforms() -> Sequence[PlatformEntry]:
    return [PlatformEntry("tpu", probe, _load)]


@hookimpl
def isthmus_register_kernels(registry: KernelRegistry, platform: Platform) -> None:
    if platform.name == "tpu":
        from isthmus_tpu import activation, attention, sampling

        attention.register(registry, on_cpu=wants_cpu())
        registry.add_op("sample", PROVIDER, sampling.sample)
        registry.add_op("gelu_and_mul", PROVIDER, activation.gelu_and_mul)


def _load() -> Platform:
    if wants_cpu():
        os.environ[RUNTIME] = "CPU"  # read once, when torch_xla is imported
        from isthmus_tpu.on_cpu import TpuOnCpuPlatform

        return TpuOnCpuPlatform()
    from isthmus_tpu.platform import TpuPlatform

    return TpuPlatform()
