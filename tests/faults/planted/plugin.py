"""The plugin, torch-free, and what is wrong with the plugins of some faults."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from isthmus.plugins import PlatformEntry, Probe, hookimpl
from isthmus.plugins.entry import ONLY_BY_NAME

if TYPE_CHECKING:
    from isthmus.ops.registry import KernelRegistry
    from isthmus.platforms import Platform

NAME = "planted"


class Plugin:
    """Offers the platform with the parts that the fault of this name has; with "" it is right."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    @hookimpl
    def isthmus_platforms(self) -> Sequence[PlatformEntry]:
        return [PlatformEntry(NAME, self.probe, self.load)]

    @hookimpl
    def isthmus_register_kernels(self, registry: KernelRegistry, platform: Platform) -> None:
        from .platform import PlantedPlatform

        if isinstance(platform, PlantedPlatform):
            platform.register_kernels(registry)

    def probe(self) -> Probe:
        return Probe(ONLY_BY_NAME, "only when named", device_count=2)

    def load(self) -> Platform:
        from .faults import ALL
        from .platform import Parts

        parts = ALL[self._fault].parts if self._fault else Parts(dtypes=("float32", "bfloat16"))
        return parts.platform(parts)


class RaisingProbe(Plugin):
    def probe(self) -> Probe:
        raise OSError("no such file: the driver's version")


class ProbeWithTorch(Plugin):
    def probe(self) -> Probe:
        import torch

        return Probe(ONLY_BY_NAME, f"torch {torch.__version__}", device_count=2)


class ChangingProbe(Plugin):
    """Another count every time, as a probe has that tells what is free now."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self._counts: Iterator[int] = itertools.count(1)

    def probe(self) -> Probe:
        return Probe(ONLY_BY_NAME, "only when named", device_count=next(self._counts))


class HoldingProbe(Plugin):
    """Leaves a device open."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self._held: list[TextIO] = []

    def probe(self) -> Probe:
        self._held.append(open("/dev/full"))  # noqa: SIM115
        return super().probe()


class LyingProbe(Plugin):
    """Says usable, and is not."""

    def load(self) -> Platform:
        raise RuntimeError("the driver is too old")
