"""The platform under test, started once for a whole run of the kit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from isthmus.ops.native import register_native
from isthmus.ops.registry import KernelRegistry
from isthmus.platforms import AttentionBackend, DeviceInfo, LinearBackend, Platform
from isthmus.plugins.manager import PluginManager, Selection


@dataclass(frozen=True, slots=True)
class Target:
    """A started platform: its device is bound to this process, its kernels are registered."""

    plugins: PluginManager
    selection: Selection
    info: DeviceInfo
    device: torch.device
    registry: KernelRegistry
    attention: str | None = None
    """The attention backend that models run on; None = the platform's own choice."""

    @classmethod
    def start(cls, name: str, plugins: PluginManager, attention: str | None = None) -> Target:
        """Load platform `name` and bind this process to its first device.

        Raises UnknownPlatformError, NoPlatformError with the platform's reason, or whatever the platform raises.
        """
        selection = plugins.select(name)
        platform = selection.platform
        info = platform.device_info(0)
        device = platform.init_device(0)
        registry = KernelRegistry()
        register_native(registry)
        plugins.register_kernels(registry, platform)
        return cls(plugins, selection, info, device, registry, attention)

    @property
    def name(self) -> str:
        return self.selection.name

    @property
    def platform(self) -> Platform:
        return self.selection.platform

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The device's compute dtypes, the preferred one first."""
        return tuple(getattr(torch, name) for name in self.info.dtypes)

    @property
    def attention_backends(self) -> Mapping[str, type[AttentionBackend]]:
        """Every registered attention backend, native included: it is what a declined spec runs on."""
        return self.registry.attention_backends()

    @property
    def linear_backends(self) -> Mapping[str, type[LinearBackend]]:
        return self.registry.linear_backends()

    @property
    def settings(self) -> Mapping[str, str]:
        """What every engine on this target is given, as keywords of `LLM`."""
        return {} if self.attention is None else {"attention_backend": self.attention}

    def synchronize(self) -> None:
        self.platform.synchronize(self.device)
