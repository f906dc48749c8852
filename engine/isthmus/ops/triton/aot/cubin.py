"""Figures of a kernel that was compiled for a compute capability: PTX, and a cubin that `cuobjdump` reads."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from triton import knobs

from isthmus.ops.triton.aot.figures import Figures
from isthmus.ops.triton.aot.instructions import count
from isthmus.ops.triton.arch import Arch

MATRIX: Mapping[str, str] = MappingProxyType(
    {"mma": r"\bmma\.sync", "wgmma": r"\bwgmma\.mma_async", "tcgen05": r"\btcgen05\.mma"}
)
COPIES: Mapping[str, str] = MappingProxyType(
    {"cp.async": r"\bcp\.async\.c[ag]\b", "TMA": r"\bcp\.async\.bulk\.tensor", "ldmatrix": r"\bldmatrix"}
)
SPILL_BYTES = 4
"""Of a register."""
REGISTERS = 65536
"""Of a multiprocessor."""
REGISTER_UNIT = 256
"""Registers that a warp gets a multiple of."""
LANES = 32


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """Limits of what runs at a time (CUDA C++ Programming Guide, "Compute Capabilities").

    system_bytes: of shared memory that each program takes besides its own.
    """

    warps: int
    programs: int
    shared_bytes: int
    system_bytes: int = 1024


MULTIPROCESSORS: Mapping[str, Multiprocessor] = MappingProxyType(
    {
        "sm_80": Multiprocessor(64, 32, 167936),
        "sm_86": Multiprocessor(48, 16, 102400),
        "sm_89": Multiprocessor(48, 24, 102400),
        "sm_90": Multiprocessor(64, 32, 233472),
        "sm_100": Multiprocessor(64, 32, 233472),
        "sm_120": Multiprocessor(48, 24, 102400),
    }
)


def read(compiled: Any, arch: Arch) -> Figures:
    """Of a CompiledKernel. Bytes of stack are counted as spills: the kernels have no arrays."""
    usage = resource_usage(compiled.asm["cubin"])
    scratch = usage["STACK"] + usage["LOCAL"]
    shared, num_warps = compiled.metadata.shared, compiled.metadata.num_warps
    return Figures(
        registers=usage["REG"],
        spills=scratch // SPILL_BYTES,
        scalar_spills=0,
        scratch_bytes=scratch,
        shared_bytes=shared,
        num_warps=num_warps,
        programs=programs(MULTIPROCESSORS[arch.name], usage["REG"], shared, num_warps),
        matrix=count(MATRIX, compiled.asm["ptx"]),
        copies=count(COPIES, compiled.asm["ptx"]),
    )


def resource_usage(cubin: bytes) -> Mapping[str, int]:
    """REG, STACK, LOCAL, ... of its only kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", text)}


def programs(limits: Multiprocessor, registers: int, shared_bytes: int, num_warps: int) -> int:
    """Programs of which a multiprocessor has room for at a time."""
    of_a_warp = -(-registers * LANES // REGISTER_UNIT) * REGISTER_UNIT
    return min(
        limits.programs,
        limits.warps // num_warps,
        REGISTERS // of_a_warp // num_warps,
        limits.shared_bytes // (shared_bytes + limits.system_bytes),
    )
