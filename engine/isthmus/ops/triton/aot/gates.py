"""What is not acceptable of a compiled kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isthmus.ops.triton.aot.figures import Built
from isthmus.ops.triton.arch import ARCHS

COMPILES, SHARED, SPILLS, SCALAR_SPILLS, MATRIX = "compiles", "shared", "spills", "scalar spills", "matrix"
MAX_SCALAR_SPILLS = 20
"""They go to lanes of vector registers; so few cost next to nothing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A gate that a kernel does not pass. amount: how much of what the gate counts; bytes of scratch, for spills."""

    gate: str
    built: Built
    amount: int
    text: str

    def __str__(self) -> str:
        return f"{self.built.key}: {self.text}"


def findings(built: Built) -> Iterator[Finding]:
    """All that is wrong with it."""
    arch, figures = ARCHS[built.arch], built.figures
    if figures is None:
        yield Finding(COMPILES, built, 1, f"does not compile: {built.error}")
        return
    if figures.shared_bytes > arch.shared_bytes:
        over = figures.shared_bytes - arch.shared_bytes
        text = f"takes {figures.shared_bytes} bytes of shared memory; {over} more than {arch.name} has for a program"
        yield Finding(SHARED, built, over, text)
    if figures.spills or figures.scratch_bytes:
        text = f"spills {figures.spills} registers, {figures.scratch_bytes} bytes of scratch a thread"
        yield Finding(SPILLS, built, figures.scratch_bytes, text)
    if figures.scalar_spills > MAX_SCALAR_SPILLS:
        text = f"spills {figures.scalar_spills} scalar registers, more than {MAX_SCALAR_SPILLS}"
        yield Finding(SCALAR_SPILLS, built, figures.scalar_spills, text)
    for missing in sorted(built.matrix - figures.matrix.keys()):
        text = f"has no {missing}; matrix instructions: {', '.join(figures.matrix) or 'none'}"
        yield Finding(MATRIX, built, 1, text)
