"""Plugin entry point of the rocm platform. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isthmus.plugins import PlatformEntry, hookimpl
from isthmus_rocm.probe import probe

if TYPE_CHECKING:
    from isthmus.platforms import Platform


@hookimpl
def isthmus_platforms() -> Sequence[PlatformEntry]:
    return [PlatformEntry("rocm", probe, _load)]


def _load() -> Platform:
    from isthmus_rocm.platform import RocmPlatform

    return RocmPlatform()
