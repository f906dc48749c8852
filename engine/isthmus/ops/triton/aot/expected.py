"""The matrix instruction that attention must have, by architecture and kind of step."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from isthmus.ops.triton.arch import Arch
from isthmus.ops.triton.tuning import DECODE, PREFILL

MATRIX_INSTRUCTIONS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("sm8x", PREFILL): "mma",
        ("sm8x", DECODE): "mma",
        ("sm9x", PREFILL): "wgmma",
        ("sm9x", DECODE): "mma",
        ("sm10x", PREFILL): "tcgen05",
        ("sm10x", DECODE): "mma",
        ("sm12x", PREFILL): "mma",
        ("sm12x", DECODE): "mma",
        ("gfx9", PREFILL): "mfma",
        ("gfx9", DECODE): "mfma",
        ("gfx11", PREFILL): "wmma",
        ("gfx11", DECODE): "wmma",
        ("gfx12", PREFILL): "wmma",
        ("gfx12", DECODE): "wmma",
    }
)
"""(family, kind of step) -> the instruction without which most of the device idles. The largest take 64 rows at least,
and a decode has 16.
"""
FULL_PRECISION = frozenset({"gfx9"})
"""Families that multiply float32 matrices. The others would round the operands to 10 bits, which float32 does not
allow, so they compute without matrix instructions.
"""


def matrix_instructions(arch: Arch, kind: str, itemsize: int) -> frozenset[str]:
    """What attention must have on `arch`, for operands of `itemsize` bytes; nothing where there is no instruction."""
    if itemsize > 2 and arch.family not in FULL_PRECISION:
        return frozenset()
    return frozenset({MATRIX_INSTRUCTIONS[arch.family, kind]})
