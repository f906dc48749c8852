"""What a plugin says about a platform before anything heavy is imported. Torch-free, and must stay so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.platforms import Platform

API_VERSION = 1
"""Version of the plugin contract that this isthmus speaks. A change that breaks a plugin raises it."""
OLDEST_API_VERSION = 1
"""The oldest version whose plugins this isthmus still accepts."""

UNUSABLE = 0
"""Priority of a platform that cannot be used here."""
ONLY_BY_NAME = -1
"""Priority of a platform that can be used, but only when it is asked for."""
HOST = 1
"""Usual priority of a host CPU."""
ACCELERATOR = 100
"""Usual priority of an accelerator."""


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
    """One platform on offer. `probe` must be cheap, make no device context and import no torch; `load` may do both.

    api_version: the version of the contract that the platform was written for, as a number of its own: a copy of
    `API_VERSION` would agree with whatever is installed. A platform that does not say was written for the first.
    """

    name: str
    probe: Callable[[], Probe]
    load: Callable[[], Platform]
    api_version: int = 1
