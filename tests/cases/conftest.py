"""Every case runs on engines as the end-to-end tests do, under a hard limit: a hang is a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.conftest import make_llm, solo, tiny_llama

__all__ = ["make_llm", "solo", "tiny_llama"]

TIMEOUT_S = 30


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
