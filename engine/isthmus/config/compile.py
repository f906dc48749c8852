"""How a step is turned into device work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from isthmus.config.field import Spec
from isthmus.config.section import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfig(Section):
    """How a step is turned into device work."""

    path: ClassVar[str] = "compile"

    mode: Annotated[str, Spec(choices=("eager",), help="eager runs one kernel after the other, without capture.")] = (
        "eager"
    )
