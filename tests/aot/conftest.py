"""Tests of what is compiled ahead of time. For a process that does not interpret kernels."""

from __future__ import annotations

import pytest

from isthmus.ops.triton import unavailable_reason

REASON = unavailable_reason()

collect_ignore_glob = ["test_*.py"] if REASON is not None else []


def pytest_report_header() -> str | None:
    return None if REASON is None else f"tests/aot is left out: {REASON}"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of compiled kernels, one for the whole run: nothing of earlier ones, nothing left in the user's."""
    folder = tmp_path_factory.getbasetemp() / "triton-cache"
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
