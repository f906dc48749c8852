"""Facts of this host's processor read from /proc. Torch-free. `root` is "/" outside tests."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
NATIVE_BF16_FLAGS = ("amx_bf16", "avx512_bf16")
_FLAGS_BY_WIDTH = (*NATIVE_BF16_FLAGS, "avx512f", "avx2", "asimd")


@dataclass(frozen=True, slots=True)
class Cpu:
    """One kind of processor. `flags` are the kernel's names of instruction sets."""

    name: str
    machine: str
    num_cores: int
    flags: frozenset[str]

    @property
    def has_native_bfloat16(self) -> bool:
        """Whether matrix products in bfloat16 have instructions of their own."""
        return not self.flags.isdisjoint(NATIVE_BF16_FLAGS)

    @property
    def best_flag(self) -> str | None:
        """The most capable vector or matrix instruction set, of those that matter here."""
        return next((flag for flag in _FLAGS_BY_WIDTH if flag in self.flags), None)


def read_cpu(root: Path = ROOT) -> Cpu:
    """The first processor of /proc/cpuinfo; `num_cores` counts those that this process may run on."""
    fields = _fields((root / "proc/cpuinfo").read_text().split("\n\n")[0])
    machine = platform.machine()
    flags = fields.get("flags", fields.get("Features", ""))
    return Cpu(fields.get("model name", machine), machine, len(os.sched_getaffinity(0)), frozenset(flags.split()))


def _fields(text: str) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}
