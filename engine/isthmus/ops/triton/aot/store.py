"""Figures as JSON, and what has changed since they were kept."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isthmus.errors import KernelError
from isthmus.ops.triton.aot.figures import Built, Figures

REGISTERS_TOLERANCE = 8
"""What a compiler's patch release may move."""
SHARED_TOLERANCE = 1024
"""Bytes."""

Kept = Mapping[str, Built]
"""Key -> what was built when it was kept."""


def read(path: Path) -> dict[str, dict[str, Built]]:
    """Triton's version -> what was kept of it. Raises KernelError for a file that is none of ours."""
    if not path.exists():
        return {}
    try:
        versions: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())
        return {version: {built.key: built for built in map(_from_json, rows)} for version, rows in versions.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise KernelError(
            f"{path}: not figures of kernels ({error}); delete it, then write it with --update"
        ) from error


def write(path: Path, versions: Mapping[str, Kept]) -> None:
    """One line a kernel, in the order of the keys, so that a change is a line of a diff."""
    parts = [
        f"{json.dumps(version)}: [\n" + ",\n".join(json.dumps(_to_json(kept[key])) for key in sorted(kept)) + "\n]"
        for version, kept in sorted(versions.items())
    ]
    path.write_text("{" + ",\n".join(parts) + "}\n")


def updated(kept: Kept, built: Sequence[Built]) -> dict[str, Built]:
    """`kept` with what was built of some architectures in the place of what it had of them.

    The compiler's time is kept where it was not measured anew.
    """
    archs = {one.arch for one in built}
    others = {key: one for key, one in kept.items() if one.arch not in archs}
    return others | {one.key: _with_time(one, kept.get(one.key)) for one in built}


def changes(kept: Kept, built: Iterable[Built]) -> Iterator[str]:
    """A line for each kernel that differs by more than the tolerances, is new, or is gone."""
    now = {one.key: one for one in built}
    archs = {one.arch for one in now.values()}
    for key, one in now.items():
        if key not in kept:
            yield f"{key}: new"
            continue
        differences = list(_differences(kept[key].figures, one.figures))
        if differences:
            yield f"{key}: {', '.join(differences)}"
    for key, one in kept.items():
        if one.arch in archs and key not in now:
            yield f"{key}: gone"


def _differences(old: Figures | None, new: Figures | None) -> Iterator[str]:
    if old is None or new is None:
        if old is not new:
            yield "compiles now" if old is None else "does not compile any more"
        return
    for name, tolerance in (
        ("registers", REGISTERS_TOLERANCE),
        ("shared_bytes", SHARED_TOLERANCE),
        ("spills", 0),
        ("scratch_bytes", 0),
        ("num_warps", 0),
    ):
        before, after = getattr(old, name), getattr(new, name)
        if abs(after - before) > tolerance:
            yield f"{name} {before} -> {after}"
    for before, after in ((old.matrix, new.matrix), (old.copies, new.copies)):
        if lost := sorted(before.keys() - after.keys()):
            yield f"lost {' and '.join(lost)}"
        if gained := sorted(after.keys() - before.keys()):
            yield f"gained {' and '.join(gained)}"


def _with_time(new: Built, old: Built | None) -> Built:
    if new.cpu_s is not None or old is None:
        return new
    return Built(new.arch, new.kernel, new.case, new.matrix, new.figures, new.error, old.cpu_s)


def _to_json(built: Built) -> dict[str, Any]:
    return {**asdict(built), "matrix": sorted(built.matrix)}


def _from_json(row: dict[str, Any]) -> Built:
    figures = None if row["figures"] is None else Figures(**row["figures"])
    return Built(**{**row, "matrix": frozenset(row["matrix"]), "figures": figures})
