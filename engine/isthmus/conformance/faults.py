"""Errors of a platform's code as text for a report."""

from __future__ import annotations

import traceback


def describe(error: BaseException) -> str:
    """An AssertionError's own message; of any other error the type, the text and where it was raised."""
    if isinstance(error, AssertionError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f"\n  raised at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
