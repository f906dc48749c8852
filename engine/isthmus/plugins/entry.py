"""What a plugin says about a platform before anything heavy is imported. Torch-free, and must stay so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.platforms import Platform

API_VERSION = 1
"""Version of the plugin contract that this isthmus speaks."""

UNUSABLE, ONLY_BY_NAME, HOST, ACCELERATOR = 0, -1, 1, 100
"""Usual priorities of a `Probe`."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Answer of a probe. `reason` is a short phrase for people: what was found, or what is missing.

    priority: 0 not usable here, -1 usable but only when named, 1 a host CPU, 100 an accelerator.
    """

    priority: int
    reason: str
    device_count: int = 0


@dataclass(frozen=True, slots=True)
class PlatformEntry:
    """One platform on offer. `probe` must be cheap, make no device context and import no torch; `load` may do both."""

    name: str
    probe: Callable[[], Probe]
    load: Callable[[], Platform]
    api_version: int = API_VERSION
