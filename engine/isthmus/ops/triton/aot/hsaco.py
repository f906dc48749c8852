"""Figures of a kernel that was compiled for a gfx architecture: its assembler text says them all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from isthmus.ops.triton.aot.figures import Figures
from isthmus.ops.triton.aot.instructions import count
from isthmus.ops.triton.arch import Arch

MATRIX: Mapping[str, str] = MappingProxyType({"mfma": r"\bv_mfma_\w+", "wmma": r"\bv_wmma_\w+"})
COPIES: Mapping[str, str] = MappingProxyType(
    {
        "buffer_load": r"\bbuffer_load_(?!.* lds)",
        "lds_dma": r"\b(?:buffer_load_.* lds\b|global_load_lds)",
        "global_load": r"\bglobal_load_(?!lds)",
    }
)
SIMDS = 4
"""Units of a multiprocessor that have waves of their own: of a CU where waves have 64 lanes, of a pair of CUs, which
runs a program together, where they have 32.
"""
SHARED_PARTS: Mapping[int, int] = MappingProxyType({64: 1, 32: 2})
"""Lanes of a wave -> how often a multiprocessor has the shared memory that one program may take."""


def read(compiled: Any, arch: Arch) -> Figures:
    """Of a CompiledKernel. The compiler's own occupancy does not know of shared memory, which is given at launch."""
    text = compiled.asm["amdgcn"]
    shared, num_warps = compiled.metadata.shared, compiled.metadata.num_warps
    by_registers = _number(r"; Occupancy: (\d+)", text) * SIMDS // num_warps
    return Figures(
        registers=_number(r"\.vgpr_count:\s*(\d+)", text),
        spills=_number(r"\.vgpr_spill_count:\s*(\d+)", text),
        scalar_spills=_number(r"\.sgpr_spill_count:\s*(\d+)", text),
        scratch_bytes=_number(r"\.private_segment_fixed_size:\s*(\d+)", text),
        shared_bytes=shared,
        num_warps=num_warps,
        programs=min(by_registers, arch.shared_bytes * SHARED_PARTS[arch.wave_size] // max(shared, 1)),
        matrix=count(MATRIX, text),
        copies=count(COPIES, text),
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern!r} in the assembler text: another compiler than the one this was written for?")
    return int(found[1])
