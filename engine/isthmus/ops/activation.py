"""Gated activations: the first half of each row, activated, times the second half."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from isthmus.ops.registry import Op

TOLERANCES = {torch.float32: (1e-5, 1e-6), torch.float16: (2e-3, 1e-3), torch.bfloat16: (1.6e-2, 1e-2)}
GELU_TOLERANCES = {**TOLERANCES, torch.float32: (1e-5, 4e-6)}
"""The native `1 + tanh` of a gate near -5 cancels to a multiple of 2^-24: times the gate and `up`, which is 13 among
100,000 numbers of size 3, that is 2e-6.
"""
SHAPES = ((1, 64), (7, 18), (33, 1152), (0, 64))
"""[N, 2C]"""


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of x = [gate | up]; [N, 2C] -> [N, C]. The activation is rounded before the product."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up of x = [gate | up], tanh approximation; [N, 2C] -> [N, C]. Rounds as `silu_and_mul` does."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def _inputs(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    for shape in SHAPES:
        yield ((torch.randn(shape, generator=generator) * 3).to(device, dtype),)


SILU_AND_MUL = Op("silu_and_mul", silu_and_mul, _inputs, TOLERANCES)
GELU_AND_MUL = Op("gelu_and_mul", gelu_and_mul, _inputs, GELU_TOLERANCES)
