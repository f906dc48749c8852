"""The file that a batch is asked by: one request a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.errors import ConfigError
from isthmus.server.protocol.common import is_unicode

_MAX_SHOWN = 5
"""Problems of a file that are told; there may be as many as lines."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request. custom_id: the caller's name for it.  body: a JSON object, or whatever stands in its place."""

    custom_id: str
    method: Any
    url: Any
    body: Any


def read_lines(path: Path) -> list[BatchLine]:
    """The requests of a batch file; empty lines are none.

    Raises ConfigError for a file that cannot be read, and for lines that no answer could be matched to: those that are
    no JSON object, have no custom_id, or one that is there already.
    """
    found: list[BatchLine] = []
    problems: list[str] = []
    first_at: dict[str, int] = {}
    for number, text in _numbered(path):
        line = _parse(text)
        if isinstance(line, str):
            problems.append(f"{path}:{number}: {line}")
        elif (before := first_at.setdefault(line.custom_id, number)) != number:
            problems.append(
                f"{path}:{number}: custom_id {line.custom_id!r} is that of line {before} too; make it unique"
            )
        else:
            found.append(line)
    if problems:
        more = len(problems) - _MAX_SHOWN
        raise ConfigError(problems[:_MAX_SHOWN] + ([f"... and {more} more"] if more > 0 else []))
    return found


def _numbered(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from ((number, text) for number, text in enumerate(file, start=1) if text.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"--input-file={path}: cannot be read: {error}; give a batch file"]) from error


def _parse(text: str) -> BatchLine | str:
    """The request, or what is wrong with the line."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"is no JSON: {error}; correct the line"
    if not isinstance(data, dict):
        return f"is a {type(data).__name__}, not a JSON object; write one request a line"
    custom_id = data.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id or not is_unicode(custom_id):
        return "has no custom_id, which is the text that its answer is found by; give it one"
    return BatchLine(custom_id, data.get("method"), data.get("url"), data.get("body"))
