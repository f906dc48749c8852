"""Which attention backends the tpu platform offers."""

from __future__ import annotations

import logging

import pytest

from isthmus.ops.registry import KernelRegistry
from isthmus_tpu.attention import PRIORITY, register


def test_without_jax_the_log_says_what_pallas_needs(caplog: pytest.LogCaptureFixture) -> None:
    registry = KernelRegistry()
    with caplog.at_level(logging.INFO):
        register(registry, on_cpu=False, has_module=lambda name: False)
    assert list(registry.attention_backends()) == ["padded"]
    assert caplog.messages == ["attention pallas is not offered: jax is not installed; pip install isthmus[tpu-pallas]"]


def test_the_kernel_comes_first_where_it_is() -> None:
    assert PRIORITY == ("pallas", "padded")
