"""Triton's cache as something to ship. It keeps absolute paths, so it must be told where it lies after a move."""

from __future__ import annotations

import json
from pathlib import Path

from isthmus.errors import KernelError

GROUPS = "__grp__*.json"
"""Of each kernel, the file that lists the others."""
PATHS = "child_paths"


def relocate(folder: Path) -> int:
    """Make a cache that was copied to `folder` usable there; returns how many kernels it has.

    Raises KernelError if there are none.
    """
    groups = sorted(folder.glob(f"*/{GROUPS}"))
    if not groups:
        raise KernelError(f"{folder}: no kernels in it; name the folder that was --out of `isthmus kernels compile`")
    for group in groups:
        listed = json.loads(group.read_text())
        here = {name: str(group.parent.resolve() / Path(path).name) for name, path in listed[PATHS].items()}
        group.write_text(json.dumps({**listed, PATHS: here}))
    return len(groups)
