"""conftest.py of the copy that is mutated: the quickest tests first, since most mutants fail many of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

STATS = Path("mutmut-stats.json")
"""How long each test took, as mutmut measured it before the first mutant."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    durations = json.loads(STATS.read_text())["duration_by_test"] if STATS.exists() else {}
    items.sort(key=lambda item: durations.get(item.nodeid, 0.0))
