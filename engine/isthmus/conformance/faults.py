"""Errors of a platform's code as text for a report."""

from __future__ import annotations

import traceback
from pathlib import Path


def describe(error: BaseException) -> str:
    """An AssertionError's own message; of any other error the type, the text and where it was raised."""
    if isinstance(error, AssertionError):
        # pytest appends the compared values to a message, and stands them alone where there is none.
        message, _, introspection = str(error).partition("\nassert ")
        return message or introspection
    frames = traceback.extract_tb(error.__traceback__)
    # Two parts of the path: reports travel, and where this machine keeps its files is nobody's business.
    where = f"\n  raised at {'/'.join(Path(frames[-1].filename).parts[-2:])}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
