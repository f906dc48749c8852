"""Facts of GPU architectures that kernels, planner and compile checks go by. One row an architecture, one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Arch:
    """name: as `DeviceInfo.arch` gives it.  family: key of tuning rows that serve several architectures.

    shared_bytes: what one program may take of shared memory (LDS).  wave_size: threads that run in lockstep.
    fp8_kv: names of the torch dtypes that a KV cache may have besides the compute dtype's, the native one first.
    multiprocessors: of a common part (SMs, CUs); a device says its own.
    """

    name: str
    family: str
    shared_bytes: int
    wave_size: int
    fp8_kv: tuple[str, ...]
    multiprocessors: int


_E4M3, _E4M3_FNUZ, _E5M2 = "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"

# A100, A40, L40S, H100, B200, RTX 5090, MI250X (one die), MI300X, MI355X, RX 7900 XTX, RX 9070 XT.
_ROWS = (
    Arch("sm_80", "sm8x", 166912, 32, (_E5M2,), 108),
    Arch("sm_86", "sm8x", 101376, 32, (_E5M2,), 84),
    Arch("sm_89", "sm8x", 101376, 32, (_E4M3, _E5M2), 142),
    Arch("sm_90", "sm9x", 232448, 32, (_E4M3, _E5M2), 132),
    Arch("sm_100", "sm10x", 232448, 32, (_E4M3, _E5M2), 148),
    Arch("sm_120", "sm12x", 101376, 32, (_E4M3, _E5M2), 170),
    Arch("gfx90a", "gfx9", 65536, 64, (_E4M3, _E5M2), 104),
    Arch("gfx942", "gfx9", 65536, 64, (_E4M3_FNUZ, _E4M3, _E5M2), 304),
    Arch("gfx950", "gfx9", 163840, 64, (_E4M3, _E5M2), 256),
    Arch("gfx1100", "gfx11", 65536, 32, (_E5M2,), 96),
    Arch("gfx1201", "gfx12", 65536, 32, (_E4M3, _E5M2), 64),
)

ARCHS: Mapping[str, Arch] = MappingProxyType({arch.name: arch for arch in _ROWS})
"""Name -> facts."""
