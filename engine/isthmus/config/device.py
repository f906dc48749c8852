"""Which hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from isthmus.config.field import AUTO, Spec
from isthmus.config.section import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig(Section):
    """Which platform, and which of its devices."""

    path: ClassVar[str] = "device"

    device: Annotated[
        str, Spec(help="A platform that `isthmus platforms` lists; auto is the best one that is usable here.")
    ] = AUTO
    index: Annotated[int, Spec(min=0, help="Which of the platform's devices, counted from 0.")] = 0
    num_threads: Annotated[
        int | None,
        Spec(fallback=None, min=1, unit="threads", help="Host threads of torch; none leaves torch its own choice."),
    ] = AUTO
