"""Whether the other tests of this folder run here."""

from __future__ import annotations

import os

import pytest

from tpu_aot.conftest import MISSING, REQUIRED


def test_the_packages_are_here() -> None:
    if MISSING and REQUIRED not in os.environ:
        pytest.skip(f"not installed: {', '.join(MISSING)}; run nox -s 'conformance(tpu-aot)'")
    assert MISSING == []
