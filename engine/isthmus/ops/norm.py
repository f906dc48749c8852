"""RMS normalisation, alone and fused with the residual add."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from isthmus.ops.registry import Op

EPS = 1e-6
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1.6e-2)}
SHAPES = ((1, 64), (7, 16), (33, 576), (5, 1000), (0, 64))
"""[N, C]: one row, a short odd row, a width that is no power of two, an empty batch."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension; x [N, C], weight [C], result in x.dtype.

    Normalises in float32, rounds to weight.dtype, then multiplies. So a weight in the activation's dtype gives the
    rounding of Llama, and a float32 weight that of Gemma.
    """
    if weight.dtype == torch.float32:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(weight.dtype).mul_(weight).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual); x and residual [N, C] of one dtype, weight [C]."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def _weight_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return (dtype,) if dtype == torch.float32 else (dtype, torch.float32)


def _rms_norm_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    for rows, width in SHAPES:
        for weight_dtype in _weight_dtypes(dtype):
            x = torch.randn(rows, width, generator=generator) * 3
            weight = 1 + 0.1 * torch.randn(width, generator=generator)
            yield x.to(device, dtype), weight.to(device, weight_dtype), EPS


def _fused_add_inputs(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(1)
    for x, weight, eps in _rms_norm_inputs(device, dtype):
        yield x, torch.randn(x.shape, generator=generator).to(device, dtype), weight, eps


RMS_NORM = Op("rms_norm", rms_norm, _rms_norm_inputs, TOLERANCES)
FUSED_ADD_RMS_NORM = Op("fused_add_rms_norm", fused_add_rms_norm, _fused_add_inputs, TOLERANCES)
