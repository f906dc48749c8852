"""Counting instructions in assembler text."""

from __future__ import annotations

import re
from collections.abc import Mapping


def count(patterns: Mapping[str, str], text: str) -> dict[str, int]:
    """Name -> matches of its pattern, of those that have any."""
    counts = {name: len(re.findall(pattern, text)) for name, pattern in patterns.items()}
    return {name: number for name, number in counts.items() if number}
