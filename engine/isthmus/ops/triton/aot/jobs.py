"""What is to be compiled: each variant that any workload launches, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from isthmus.ops.triton.aot.record import Variant, recording
from isthmus.ops.triton.aot.workload import Workload
from isthmus.ops.triton.arch import Arch

ATTENTION = "attention"
"""What the names of kernels start with that multiply matrices."""


@dataclass(frozen=True, slots=True)
class Job:
    """arch: by name.  case, matrix: as in `Built`."""

    variant: Variant
    arch: str
    case: str
    matrix: frozenset[str]


def jobs(arch: Arch, workloads: Iterable[Workload]) -> list[Job]:
    """In the order of the launches. A workload's later variants of one kernel are numbered: "rms_norm bf16 8B #2"."""
    found: dict[Variant, Job] = {}
    for workload in workloads:
        with recording(arch) as launches:
            workload.run()
        seen: Counter[str] = Counter()
        for variant in dict.fromkeys(launch.variant for launch in launches):
            seen[variant.name] += 1
            number = f" #{seen[variant.name]}" if seen[variant.name] > 1 else ""
            first = found.get(variant, Job(variant, arch.name, workload.name + number, frozenset()))
            is_attention = variant.name.startswith(ATTENTION)
            found[variant] = replace(first, matrix=first.matrix | workload.matrix) if is_attention else first
    return list(found.values())
