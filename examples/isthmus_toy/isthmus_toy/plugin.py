"""What isthmus asks before a device is chosen. Every process loads this module, so it imports nothing heavy."""

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
    return [PlatformEntry("toy", _probe, _load, api_version=1)]


@hookimpl
def isthmus_register_kernels(registry: KernelRegistry, platform: Platform) -> None:
    if platform.name == "toy":  # every plugin is asked, whichever platform was chosen
        from isthmus_toy.attention import ToyAttentionBackend

        registry.add_attention(ToyAttentionBackend)


def _probe() -> Probe:
    # Yours: look for the driver. ACCELERATOR if it is there; UNUSABLE, and what is missing, if it is not.
    return Probe(ONLY_BY_NAME, "the host's processor under another name", device_count=1)


def _load() -> Platform:
    from isthmus_toy.platform import ToyPlatform

    return ToyPlatform()
