"""How a step is turned into device work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from isthmus.config.field import AUTO, Spec
from isthmus.config.section import Section

EAGER, GRAPH = "eager", "graph"
"""Values of `compile.mode`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfig(Section):
    """How a step is turned into device work."""

    path: ClassVar[str] = "compile"

    mode: Annotated[
        str,
        Spec(
            choices=(EAGER, GRAPH),
            fallback=EAGER,
            help="eager runs one kernel after the other; graph captures steps of fixed sizes at start and replays "
            "them, where the platform can.",
        ),
    ] = AUTO
