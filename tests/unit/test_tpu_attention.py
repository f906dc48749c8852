"""Which attention backends the tpu platform offers."""

from __future__ import annotations

import logging

import pytest

from isthmus.ops.registry import KernelRegistry
from isthmus_tpu.attention import PRIORITY, register


@pytest.mark.parametrize(("present", "named"), [((), "jax and torchax"), (("jax",), "torchax"), (("torchax",), "jax")])
def test_without_jax_the_log_says_what_pallas_needs(
    present: tuple[str, ...], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry = KernelRegistry()
    with caplog.at_level(logging.INFO):
        register(registry, on_cpu=False, has_module=lambda name: name in present)
    assert list(registry.attention_backends()) == ["padded"]
    assert caplog.messages == [
        f"attention pallas is not offered: {named} not installed; pip install isthmus[tpu-pallas]"
    ]


def test_the_kernel_comes_first_where_it_is() -> None:
    assert PRIORITY == ("pallas", "padded")
