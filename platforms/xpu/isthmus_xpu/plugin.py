"""Plugin entry point of the xpu platform. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isthmus.plugins import PlatformEntry, hookimpl
from isthmus_xpu.probe import probe

if TYPE_CHECKING:
    from isthmus.platforms import Platform


@hookimpl
def isthmus_platforms() -> Sequence[PlatformEntry]:
    return [PlatformEntry("xpu", probe, _load)]


def _load() -> Platform:
    from isthmus_xpu.platform import XpuPlatform

    return XpuPlatform()
