"""Attention on the tpu platform: which backends are registered, and why the others are not."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from isthmus_tpu.padded_attention import PaddedAttentionBackend

if TYPE_CHECKING:
    from isthmus.ops.registry import KernelRegistry

logger = logging.getLogger(__name__)

PALLAS, PADDED = "pallas", PaddedAttentionBackend.name
PRIORITY = (PALLAS, PADDED)
JAX = "jax"
"""What torch_xla needs to put a function of JAX into a program, in the version that its extra `pallas` names."""


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def register(registry: KernelRegistry, *, on_cpu: bool, has_module: Callable[[str], bool] = _has_module) -> None:
    """Add what can be used here; the log says why the rest cannot.

    on_cpu: on XLA's CPU device, where the kernel runs in Pallas's interpreter, under a name that nothing prefers.
    """
    registry.add_attention(PaddedAttentionBackend)
    if not has_module(JAX):
        logger.info("attention %s is not offered: %s is not installed; pip install isthmus[tpu-pallas]", PALLAS, JAX)
        return
    from isthmus_tpu.xla_pallas import InterpretedXlaPallasBackend, XlaPallasBackend

    registry.add_attention(InterpretedXlaPallasBackend if on_cpu else XlaPallasBackend)
