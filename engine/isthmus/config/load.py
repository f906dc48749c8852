"""How weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from isthmus.config.field import AUTO, Spec
from isthmus.config.section import Section

DUMMY = "dummy"
"""The format that reads no weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig(Section):
    """How weights are read."""

    path: ClassVar[str] = "load"

    format: Annotated[
        str | None,
        Spec(
            choices=("safetensors", "gguf", DUMMY),
            fallback=None,
            help="Format that the model's files must have; none takes any, dummy makes random weights and reads none.",
        ),
    ] = AUTO
