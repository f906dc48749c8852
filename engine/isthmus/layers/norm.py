"""RMS normalisation as a layer."""

from __future__ import annotations

import torch
from torch import nn

from isthmus.layers.env import ModelEnv
from isthmus.layers.param import whole


class RMSNorm(nn.Module):
    """x / rms(x) * weight.

    unit_offset: the checkpoint stores weight - 1 and the product is taken in float32 (Gemma).
    """

    def __init__(self, size: int, eps: float, env: ModelEnv, *, unit_offset: bool = False) -> None:
        super().__init__()
        dtype, offset = (torch.float32, 1.0) if unit_offset else (env.dtype, 0.0)
        self.weight = whole((size,), dtype, env.device, offset)
        self._eps = eps
        self._ops = env.ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, size] -> [N, size]"""
        normed: torch.Tensor = self._ops.rms_norm(x, self.weight, self._eps)
        return normed

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); residual None counts as zero"""
        if residual is None:
            return self.forward(x), x
        normed, residual = self._ops.fused_add_rms_norm(x, residual, self.weight, self._eps)
        return normed, residual
