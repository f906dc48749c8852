"""What the engine tells about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from isthmus.config.field import Spec
from isthmus.config.section import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilityConfig(Section):
    """What the engine tells about itself."""

    path: ClassVar[str] = "observability"

    log_level: Annotated[
        str,
        Spec(
            choices=("debug", "info", "warning", "error"),
            help="Least severe message that the isthmus logger shows; info explains each value chosen at start.",
        ),
    ] = "warning"
    record_schedule: Annotated[
        str | None,
        Spec(
            help="File to which every decision of the scheduler is written with its reason, for isthmus explain; an "
            "old one is replaced. none records nothing."
        ),
    ] = None
    record_max_bytes: Annotated[
        int,
        Spec(
            min=4096,
            unit="bytes",
            help="Most that a recording takes; of a longer one the newest part is kept, in FILE.1 and FILE.",
        ),
    ] = 268_435_456
