"""The page of figures, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from isthmus.ops.triton.aot.figures import Built
from isthmus.ops.triton.aot.store import Kept
from isthmus.ops.triton.aot.waivers import Waiver, judge
from isthmus.ops.triton.arch import ARCHS

HEAD = """# Kernels, compiled ahead of time

Written by `isthmus kernels compile --figures docs/support/kernels/figures.json --update`; do not edit. No device was
there: this says what the compiler made of each kernel, not how fast it is, nor that it is right. See
[kernels.md](../kernels.md) for what the columns mean and which gates there are.
"""
COLUMNS = (
    "kernel", "case", "registers", "spilled", "shared, KiB", "programs", "matrix", "copies", "compile, CPU s",
)  # fmt: skip


def page(versions: Mapping[str, Kept], waivers: Sequence[Waiver]) -> str:
    """A section for each version of Triton, and in it a table for each architecture."""
    parts = [HEAD]
    for version, kept in sorted(versions.items()):
        parts += [f"\n## Triton {version}\n\n{_summary(version, list(kept.values()), waivers)}"]
        for arch in ARCHS.values():
            rows = [one for one in kept.values() if one.arch == arch.name]
            if rows:
                limit = f"{arch.shared_bytes // 1024} KiB of shared memory for a program"
                parts.append(f"\n### {arch.name}\n\n{limit}.\n\n{_table(rows)}")
    return "".join(parts)


def _summary(version: str, built: Sequence[Built], waivers: Sequence[Waiver]) -> str:
    judgement = judge(version, built, waivers)
    lines = [f"{len(built)} kernels, {len(judgement.faults)} of which fail a gate."]
    lines += [f"- Fails: {fault}" for fault in judgement.faults]
    lines += [f"- Waived: {finding}. {waiver.reason}" for finding, waiver in judgement.waived]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Built]) -> str:
    lines = [_line(COLUMNS), _line(["---"] * len(COLUMNS))]
    return "\n".join([*lines, *(_line(list(_cells(one))) for one in sorted(rows, key=lambda one: one.key))]) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(one: Built) -> Iterator[str]:
    yield from (one.kernel, one.case)
    if one.figures is None:
        yield from (f"{one.error}", *[""] * (len(COLUMNS) - 3))
        return
    f = one.figures
    yield str(f.registers)
    yield f"{f.spills} ({f.scratch_bytes} B)" if f.spills or f.scratch_bytes else "0"
    yield f"{f.shared_bytes / 1024:g}"
    yield f"{f.programs} x {f.num_warps} warps"
    for counts in (f.matrix, f.copies):
        yield ", ".join(f"{number} {name}" for name, number in counts.items())
    yield "" if one.cpu_s is None else f"{one.cpu_s:.1f}"
