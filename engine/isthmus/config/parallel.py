"""How a model is spread over devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from isthmus.config.field import Spec
from isthmus.config.section import Section


def _one_rank_only(size: int) -> str | None:
    return None if size == 1 else "tensor parallelism is not available in isthmus 0.1; use 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig(Section):
    """How a model is spread over devices."""

    path: ClassVar[str] = "parallel"

    tensor_parallel_size: Annotated[
        int, Spec(min=1, unit="ranks", check=_one_rank_only, help="Devices that share each layer; isthmus 0.1 has 1.")
    ] = 1
