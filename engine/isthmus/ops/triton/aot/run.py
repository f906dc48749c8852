"""All of it: record, compile, judge, compare with what was kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import triton

from isthmus.errors import KernelError
from isthmus.ops.triton.aot import store
from isthmus.ops.triton.aot.build import build
from isthmus.ops.triton.aot.figures import Built
from isthmus.ops.triton.aot.jobs import jobs
from isthmus.ops.triton.aot.page import page
from isthmus.ops.triton.aot.waivers import WAIVERS, Judgement, judge
from isthmus.ops.triton.aot.workload import Workload
from isthmus.ops.triton.aot.workloads import workloads
from isthmus.ops.triton.arch import ARCHS, Arch


@dataclass(frozen=True, slots=True)
class Outcome:
    """triton: its version.  changes: lines on what differs from the figures that were kept; None = not compared."""

    triton: str
    built: tuple[Built, ...]
    judgement: Judgement
    changes: tuple[str, ...] | None = None

    @property
    def is_accepted(self) -> bool:
        return not (self.judgement.faults or self.judgement.idle or self.changes)


def compile_all(
    targets: Sequence[str],
    *,
    processes: int,
    cache_dir: Path | None = None,
    of: Callable[[Arch], Sequence[Workload]] | None = None,
) -> Outcome:
    """Everything that production launches on `targets`, names of `ARCHS`; all of them for none.

    of: the workloads; None = those of common models.

    Raises KernelError for a name that is not there, and where kernels are interpreted.
    """
    unknown = [name for name in targets if name not in ARCHS]
    if unknown:
        raise KernelError(f"target {unknown[0]!r}: no facts about it; there are some about {', '.join(ARCHS)}")
    archs = [ARCHS[name] for name in dict.fromkeys(targets or ARCHS)]
    wanted = [job for arch in archs for job in jobs(arch, (of or workloads)(arch))]
    built = build(wanted, processes=processes, cache_dir=cache_dir)
    return Outcome(triton.__version__, tuple(built), judge(triton.__version__, built))


def compared(outcome: Outcome, figures: Path) -> Outcome:
    """With what differs from a file's figures of this version of Triton, if it has any."""
    kept = store.read(figures).get(outcome.triton)
    return outcome if kept is None else replace(outcome, changes=tuple(store.changes(kept, outcome.built)))


def keep(outcome: Outcome, figures: Path) -> Path:
    """Take the figures into the file, and write the page that is named like its folder, whose path is returned."""
    versions: dict[str, store.Kept] = dict(store.read(figures))
    versions[outcome.triton] = store.updated(versions.get(outcome.triton, {}), outcome.built)
    store.write(figures, versions)
    written = figures.parent.with_suffix(".md")
    written.write_text(page(versions, WAIVERS))
    return written
