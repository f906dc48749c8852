"""Launch shapes of the attention kernel, as data. Nothing is tuned while serving.

A row is looked up by architecture, then by its family, then the safe default, which fits everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from isthmus.ops.triton.arch import Arch
from isthmus.platforms.attention import AttentionSpec

PREFILL, DECODE, PREFILL_WS = "prefill", "decode", "prefill_ws"
"""Kinds of batch; the last one for `attention_ws_kernel`, where an architecture has it."""
NARROW, WIDE = 128, 256
"""Largest head_dim of the rows of one width."""
MIN_DOT = 16
"""Rows, columns and depth that a matrix instruction has at least."""


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """block_m: rows (queries x heads of a group) of an item.  tile: keys a step of the loop.

    programs: of the persistent grid, a multiprocessor.  source: where the numbers come from.
    """

    block_m: int
    tile: int
    num_warps: int
    num_stages: int
    programs: int
    source: str
    waves_per_eu: int | None = None
    matrix_instr_nonkdim: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """What the compiler is told. Only one vendor's compiler knows the last two: they are left out where not set."""
        names = ("num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


SWEEP = "static: compiles without spills, shared/platforms.md 3.3; not measured"
WIDE_COMPILED = "static: compiles without spills at head_dim 256, with and without a window, triton 3.7.1; not measured"
WS_COMPILED = "static: 12 warps, 196904 bytes and no spills at head_dim 128, triton 3.7.1; not measured"
COMPILED = "static: compiles without spills with every feature, docs/support/kernels.md; not measured"
SAFE = AttentionRow(16, 16, 4, 1, 2, SWEEP)

ATTENTION_ROWS: Mapping[tuple[str, str, int], AttentionRow] = MappingProxyType(
    {
        ("sm8x", PREFILL, NARROW): AttentionRow(64, 32, 4, 2, 2, SWEEP),
        ("sm8x", DECODE, NARROW): AttentionRow(16, 32, 2, 3, 4, SWEEP),
        ("sm9x", PREFILL, NARROW): AttentionRow(128, 64, 8, 2, 1, SWEEP),
        ("sm9x", DECODE, NARROW): AttentionRow(16, 64, 4, 2, 2, SWEEP),
        ("sm_90", PREFILL_WS, NARROW): AttentionRow(128, 64, 4, 2, 1, WS_COMPILED),
        ("sm10x", PREFILL, NARROW): AttentionRow(128, 64, 8, 2, 1, SWEEP),
        ("sm10x", DECODE, NARROW): AttentionRow(16, 64, 4, 2, 2, SWEEP),
        ("sm12x", PREFILL, NARROW): AttentionRow(64, 32, 4, 2, 2, SWEEP),
        ("sm12x", DECODE, NARROW): AttentionRow(16, 32, 2, 3, 4, SWEEP),
        ("gfx9", PREFILL, NARROW): AttentionRow(128, 32, 4, 2, 1, SWEEP),
        ("gfx9", DECODE, NARROW): AttentionRow(16, 32, 2, 2, 2, SWEEP),
        ("gfx90a", PREFILL, NARROW): AttentionRow(128, 32, 4, 1, 1, SWEEP),
        ("gfx90a", DECODE, NARROW): AttentionRow(16, 32, 2, 1, 2, SWEEP),
        ("gfx950", DECODE, NARROW): AttentionRow(16, 64, 2, 1, 2, SWEEP),
        ("gfx11", PREFILL, NARROW): AttentionRow(32, 16, 8, 1, 2, COMPILED),
        ("gfx11", DECODE, NARROW): AttentionRow(16, 16, 8, 1, 2, COMPILED),
        ("gfx12", PREFILL, NARROW): AttentionRow(64, 32, 8, 1, 2, SWEEP),
        ("gfx12", DECODE, NARROW): AttentionRow(16, 32, 4, 1, 2, SWEEP),
        ("sm8x", PREFILL, WIDE): AttentionRow(64, 32, 8, 2, 1, WIDE_COMPILED),
        ("sm8x", DECODE, WIDE): AttentionRow(16, 16, 4, 2, 2, WIDE_COMPILED),
        ("sm9x", PREFILL, WIDE): AttentionRow(64, 32, 8, 2, 1, WIDE_COMPILED),
        ("sm9x", DECODE, WIDE): AttentionRow(16, 32, 4, 2, 2, WIDE_COMPILED),
        ("sm10x", PREFILL, WIDE): AttentionRow(64, 32, 8, 2, 1, WIDE_COMPILED),
        ("sm10x", DECODE, WIDE): AttentionRow(16, 32, 4, 2, 2, WIDE_COMPILED),
        ("sm12x", PREFILL, WIDE): AttentionRow(64, 32, 8, 2, 1, WIDE_COMPILED),
        ("sm12x", DECODE, WIDE): AttentionRow(16, 32, 8, 2, 1, WIDE_COMPILED),
        ("gfx9", PREFILL, WIDE): AttentionRow(64, 16, 4, 1, 2, WIDE_COMPILED),
        ("gfx9", DECODE, WIDE): AttentionRow(16, 32, 4, 1, 2, WIDE_COMPILED),
        ("gfx11", PREFILL, WIDE): AttentionRow(16, 16, 16, 1, 2, WIDE_COMPILED),
        ("gfx11", DECODE, WIDE): AttentionRow(16, 16, 16, 1, 2, WIDE_COMPILED),
        ("gfx12", PREFILL, WIDE): AttentionRow(32, 16, 8, 1, 1, WIDE_COMPILED),
        ("gfx12", DECODE, WIDE): AttentionRow(16, 16, 4, 1, 2, WIDE_COMPILED),
    }
)
"""(architecture or family, kind, width) -> row, for two-byte dtypes."""

FLOAT32_ROWS: Mapping[str, AttentionRow] = MappingProxyType(
    {family: AttentionRow(16, 16, 8, 1, 2, COMPILED) for family in ("gfx11", "gfx12")}
)
"""Family -> shape for float32 where the safe one spills: there it is multiplied without matrix instructions."""


def find_row(arch: Arch, kind: str, width: int) -> AttentionRow | None:
    """The row of the architecture, or else of its family."""
    return ATTENTION_ROWS.get((arch.name, kind, width)) or ATTENTION_ROWS.get((arch.family, kind, width))


def attention_row(arch: Arch, spec: AttentionSpec, kind: str) -> AttentionRow:
    """The row for a kind of batch. Its block holds a whole group of query heads, whatever the row says."""
    row = find_row(arch, kind, NARROW if spec.head_dim <= NARROW else WIDE) or SAFE
    if spec.dtype.itemsize > 2:
        row = replace(FLOAT32_ROWS.get(arch.family, SAFE), programs=row.programs)
    group = spec.num_heads // spec.num_kv_heads
    return replace(row, block_m=max(row.block_m, MIN_DOT, 1 << (group - 1).bit_length()))
