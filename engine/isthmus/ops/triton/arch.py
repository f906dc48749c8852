"""Facts of GPU architectures that kernels, planner and compile checks go by. One row an architecture, one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Arch:
    """name: as `DeviceInfo.arch` gives it.  family: key of tuning rows that serve several architectures.

    shared_bytes: what one program may take of shared memory (LDS).  wave_size: threads that run in lockstep.
    fp8_kv: names of the torch dtypes that a KV cache may have besides the compute dtype's, the native one first.
    multiprocessors: of a common part (SMs, CUs); a device says its own.
    has_tma: it copies tiles by descriptor, without the threads that wait for them.
    """

    name: str
    family: str
    shared_bytes: int
    wave_size: int
    fp8_kv: tuple[str, ...]
    multiprocessors: int
    has_tma: bool = False


_E4M3, _E4M3_FNUZ, _E5M2 = "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"

# A100, A40, L40S, H100, B200, RTX 5090, MI250X (one die), MI300X, MI355X, RX 7900 XTX, RX 9070 XT.
_ROWS = (
    Arch("sm_80", "sm8x", 166912, 32, (_E5M2,), 108),
    Arch("sm_86", "sm8x", 101376, 32, (_E5M2,), 84),
    Arch("sm_89", "sm8x", 101376, 32, (_E4M3, _E5M2), 142),
    Arch("sm_90", "sm9x", 232448, 32, (_E4M3, _E5M2), 132, has_tma=True),
    Arch("sm_100", "sm10x", 232448, 32, (_E4M3, _E5M2), 148, has_tma=True),
    Arch("sm_120", "sm12x", 101376, 32, (_E4M3, _E5M2), 170, has_tma=True),
    Arch("gfx90a", "gfx9", 65536, 64, (_E4M3, _E5M2), 104),
    Arch("gfx942", "gfx9", 65536, 64, (_E4M3_FNUZ, _E4M3, _E5M2), 304),
    Arch("gfx950", "gfx9", 163840, 64, (_E4M3, _E5M2), 256),
    Arch("gfx1100", "gfx11", 65536, 32, (_E5M2,), 96),
    Arch("gfx1201", "gfx12", 65536, 32, (_E4M3, _E5M2), 64),
)

ARCHS: Mapping[str, Arch] = MappingProxyType({arch.name: arch for arch in _ROWS})
"""Name -> facts."""
NO_FAMILY = "none"
"""Has no tuning rows: what runs is the safe one."""


def relatives(name: str) -> tuple[Arch, ...]:
    """The rows whose names begin most like this one, which the table lacks. None, if only by the vendor's letters."""
    alike = {arch: _num_alike(arch.name, name) for arch in _ROWS}
    most = max(alike.values())
    return tuple(arch for arch, count in alike.items() if count == most and name[:count][-1:].isdigit())


def _num_alike(one: str, other: str) -> int:
    """Characters that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def assumed(name: str) -> Arch | None:
    """Facts for an architecture that the table lacks: the least of what its relatives have; None if it has none.

    Of one family it gets that family's tuning rows.
    """
    rows = relatives(name)
    if not rows:
        return None
    families = {row.family for row in rows}
    return replace(
        rows[0],
        name=name,
        family=families.pop() if len(families) == 1 else NO_FAMILY,
        shared_bytes=min(row.shared_bytes for row in rows),
        # Too wide a wave makes too few of them; too narrow a one would make more threads than a program may have.
        wave_size=max(row.wave_size for row in rows),
        fp8_kv=tuple(dtype for dtype in rows[0].fp8_kv if all(dtype in row.fp8_kv for row in rows)),
        multiprocessors=min(row.multiprocessors for row in rows),
        has_tma=all(row.has_tma for row in rows),
    )
