"""The gated feed-forward block."""

from __future__ import annotations

import torch
from torch import nn

from isthmus.layers.env import ModelEnv
from isthmus.layers.linear import ColumnLinear, RowLinear


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up as one matrix. activation: name of the op that gates."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, env: ModelEnv, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_up_proj = ColumnLinear(hidden_size, [intermediate_size] * 2, env, bias=bias)
        self.down_proj = RowLinear(intermediate_size, hidden_size, env, bias=bias)
        self._activation = getattr(env.ops, activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]"""
        out: torch.Tensor = self.down_proj(self._activation(self.gate_up_proj(x)))
        return out
