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
