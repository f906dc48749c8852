"""Plugin entry point of the cuda platform. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isthmus.plugins import PlatformEntry, hookimpl
from isthmus_cuda.probe import probe

if TYPE_CHECKING:
    from isthmus.platforms import Platform


@hookimpl
def isthmus_platforms() -> Sequence[PlatformEntry]:
    return [PlatformEntry("cuda", probe, _load)]


def _load() -> Platform:
    from isthmus_cuda.platform import CudaPlatform

    return CudaPlatform()
