"""What a compiled kernel takes of a device, and which of its instructions matter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """registers: of one thread; vector registers, accumulation registers included, where there are several kinds.
    spills: registers that did not fit and went to memory.  scalar_spills: scalar registers that went to vector ones,
    which is cheap.  scratch_bytes: memory of one thread, for spills and arrays.  shared_bytes: of one program.
    programs: that a multiprocessor has room for.  matrix, copies: instruction -> how many are in the code; those of
    matrices, and those that bring data in without a detour.
    """

    registers: int
    spills: int
    scalar_spills: int
    scratch_bytes: int
    shared_bytes: int
    num_warps: int
    programs: int
    matrix: Mapping[str, int] = field(default_factory=dict)
    copies: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Built:
    """A variant of a kernel, compiled or not.

    case: the workload that launches it, the first one.  matrix: instructions that it must have, for any workload.
    figures: None if it does not compile, and then `error` says why.  cpu_s: of the compiler; None if it was cached.
    """

    arch: str
    kernel: str
    case: str
    matrix: frozenset[str]
    figures: Figures | None
    error: str | None = None
    cpu_s: float | None = None

    @property
    def key(self) -> str:
        """Its name among all."""
        return f"{self.arch} | {self.kernel} | {self.case}"
