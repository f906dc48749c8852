"""Where the tests of XLA's programs run: with torch_xla, on XLA's CPU device."""

from __future__ import annotations

import os

import pytest

from isthmus_tpu.probe import ON_CPU, RUNTIME, probe

PROBE = probe()
if PROBE.priority < 0:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ[RUNTIME] = "CPU"  # as loading the platform does, for tests that import torch_xla alone
needs_xla = pytest.mark.skipif(
    PROBE.priority >= 0, reason=f"{PROBE.reason}; `nox -s tpu-tests` runs this on XLA:CPU, with {ON_CPU}=1"
)
