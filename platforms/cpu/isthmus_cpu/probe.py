"""Whether this host can run isthmus on its CPU: always, as the last resort."""

from __future__ import annotations

from pathlib import Path

from isthmus.plugins import Probe
from isthmus.plugins.entry import HOST
from isthmus_cpu.host import ROOT, read_cpu


def probe(*, root: Path = ROOT) -> Probe:
    """A reason such as "x86_64, 2 cores, avx512_bf16"."""
    cpu = read_cpu(root)
    cores = "1 core" if cpu.num_cores == 1 else f"{cpu.num_cores} cores"
    return Probe(HOST, ", ".join(filter(None, (cpu.machine, cores, cpu.best_flag))), device_count=1)
