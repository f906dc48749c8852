"""What the TPU compiler says of a program, and whether the program could serve. Imports no jax."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus_tpu.aot_topology import Chip


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """One program on one chip. All sizes in bytes.

    donated: of the arguments that the caller gave away; num_donated is their number.  aliased: of the results that
    take over an argument's memory; num_aliased is their number.  copies: of a whole donated buffer, within the
    program; an aliased one may still be copied to another layout and back.  code: of the program itself.
    kernels: number of Pallas calls.  kernel_vmem: of the largest of them, the compiler's own scratch included.
    """

    name: str
    chip: str
    compile_seconds: float
    arguments: int
    results: int
    donated: int
    num_donated: int
    aliased: int
    num_aliased: int
    copies: int
    temporaries: int
    code: int
    kernels: int
    kernel_vmem: int

    @property
    def hbm(self) -> int:
        """All that is in the chip's memory while the program runs."""
        return self.arguments + self.results - self.aliased + self.temporaries + self.code

    def problems(self, chip: Chip, *, resident: int = 0) -> list[str]:
        """Why this program cannot serve; empty if it can. resident: bytes in memory that are not the program's."""
        found = []
        if (self.num_aliased, self.aliased) != (self.num_donated, self.donated):
            found.append(
                f"{self.num_aliased} buffers of {self.aliased} bytes are aliased, {self.num_donated} of {self.donated} "
                "were donated: the others are copied every step"
            )
        if self.copies:
            found.append(f"{self.copies} copies of whole donated buffers within the program")
        if self.hbm + resident > chip.hbm_bytes:
            found.append(f"takes {self.hbm + resident} bytes of HBM, a {chip.name} has {chip.hbm_bytes}")
        if self.kernel_vmem > chip.vmem_bytes:
            found.append(f"a kernel takes {self.kernel_vmem} bytes of VMEM, a {chip.name} gives {chip.vmem_bytes}")
        return found
