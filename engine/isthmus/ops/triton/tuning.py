"""Launch shapes of the attention kernel, as data. Nothing is tuned while serving.

A row is looked up by architecture, then by its family, then the safe default, which fits everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from isthmus.ops.triton.arch import Arch
from isthmus.platforms.attention import AttentionSpec

PREFILL, DECODE = "prefill", "decode"
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
SAFE = AttentionRow(16, 16, 4, 1, 2, SWEEP)

ATTENTION_ROWS: Mapping[tuple[str, str], AttentionRow] = MappingProxyType(
    {
        ("sm8x", PREFILL): AttentionRow(64, 32, 4, 2, 2, SWEEP),
        ("sm8x", DECODE): AttentionRow(16, 32, 2, 3, 4, SWEEP),
        ("sm9x", PREFILL): AttentionRow(128, 64, 8, 2, 1, SWEEP),
        ("sm9x", DECODE): AttentionRow(16, 64, 4, 2, 2, SWEEP),
        ("sm10x", PREFILL): AttentionRow(128, 64, 8, 2, 1, SWEEP),
        ("sm10x", DECODE): AttentionRow(16, 64, 4, 2, 2, SWEEP),
        ("sm12x", PREFILL): AttentionRow(64, 32, 4, 2, 2, SWEEP),
        ("sm12x", DECODE): AttentionRow(16, 32, 2, 3, 4, SWEEP),
        ("gfx9", PREFILL): AttentionRow(128, 32, 4, 2, 1, SWEEP),
        ("gfx9", DECODE): AttentionRow(16, 32, 2, 2, 2, SWEEP),
        ("gfx90a", PREFILL): AttentionRow(128, 32, 4, 1, 1, SWEEP),
        ("gfx90a", DECODE): AttentionRow(16, 32, 2, 1, 2, SWEEP),
        ("gfx950", DECODE): AttentionRow(16, 64, 2, 1, 2, SWEEP),
        ("gfx11", PREFILL): AttentionRow(32, 16, 4, 1, 2, SWEEP),
        ("gfx11", DECODE): AttentionRow(16, 32, 4, 1, 2, SWEEP),
        ("gfx12", PREFILL): AttentionRow(64, 32, 8, 1, 2, SWEEP),
        ("gfx12", DECODE): AttentionRow(16, 32, 4, 1, 2, SWEEP),
    }
)
"""(architecture or family, kind) -> row for two-byte dtypes and head_dim up to 128."""


def attention_row(arch: Arch, spec: AttentionSpec, kind: str) -> AttentionRow:
    """The row for a kind of batch. Its block holds a whole group of query heads, whatever the row says."""
    row = ATTENTION_ROWS.get((arch.name, kind)) or ATTENTION_ROWS.get((arch.family, kind)) or SAFE
    if spec.dtype.itemsize > 2 or spec.head_dim > 128:
        row = replace(SAFE, programs=row.programs)
    group = spec.num_heads // spec.num_kv_heads
    return replace(row, block_m=max(row.block_m, MIN_DOT, 1 << (group - 1).bit_length()))
