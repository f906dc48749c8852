"""The directory for what isthmus downloads or derives. Everything in it may be deleted at any time."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_dir() -> Path:
    """`$ISTHMUS_CACHE`, by default ~/.cache/isthmus. It need not exist yet."""
    return Path(os.environ.get("ISTHMUS_CACHE") or "~/.cache/isthmus").expanduser()


@contextmanager
def scratch_dir(parent: Path, prefix: str) -> Iterator[Path]:
    """A new directory in `parent`, on the same file system so that a rename out of it is atomic; removed at the end.

    A killed process leaves it behind under a name that starts with `prefix`.
    """
    parent.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
