"""Plugin of the NULL platform. It answers only to its name: `--device null`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isthmus.plugins import PlatformEntry, Probe, hookimpl
from isthmus.plugins.entry import ONLY_BY_NAME

if TYPE_CHECKING:
    from isthmus.ops.registry import KernelRegistry
    from isthmus.platforms import Platform


@hookimpl
def isthmus_platforms() -> Sequence[PlatformEntry]:
    return [PlatformEntry("null", _probe, _load)]


@hookimpl
def isthmus_register_kernels(registry: KernelRegistry, platform: Platform) -> None:
    from isthmus.testing.null import NullPlatform, register_kernels

    if isinstance(platform, NullPlatform):
        register_kernels(registry)


def _probe() -> Probe:
    return Probe(ONLY_BY_NAME, "only when named", device_count=1)


def _load() -> Platform:
    from isthmus.testing.null import NullPlatform

    return NullPlatform()
