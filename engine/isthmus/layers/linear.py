"""Linear layers that hold one rank's share of the weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from isthmus.layers.env import ModelEnv
from isthmus.layers.param import Param, Slot, divide, whole
from isthmus.platforms import LinearSpec


class PackedWeight:
    """A weight on its way to the kernels: as loaded, until `pack` hands it to the backend."""

    def __init__(self, weight: torch.Tensor, env: ModelEnv) -> None:
        out_features, in_features = weight.shape
        self._backend = env.linear(LinearSpec(in_features, out_features, weight.dtype))
        self._packed: Any = None

    def pack(self, weight: torch.Tensor) -> None:
        """Take the loaded weight over."""
        self._packed = self._backend.pack(weight.detach())

    def apply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] -> [T, out]; `weight` is read only if it was not packed."""
        if self._packed is None:
            return F.linear(x, weight, bias)
        return self._backend.apply(x, self._packed, bias)


class Linear(nn.Module):
    """What the two kinds share: weight [out, in], optional bias [out], the kernel. Sizes are this rank's."""

    def __init__(self, weight: Param, bias: Param | None, env: ModelEnv) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._kernel = PackedWeight(weight, env)

    def pack(self) -> None:
        """After loading: give the weight to the backend and free it."""
        self._kernel.pack(self.weight)
        self.weight.data = self.weight.data.new_empty(0)

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in] -> [T, out]"""
        return self._kernel.apply(x, self.weight, bias)


class ColumnLinear(Linear):
    """Several projections of one input as one matrix, its rows split over the ranks; the output stays split.

    out_features: rows of each projection before sharding.  shards: in how many pieces each is cut, tp_size unless
    given; fewer than tp_size means that neighbouring ranks hold the same piece (kv heads of a narrow model).
    """

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        env: ModelEnv,
        *,
        bias: bool = False,
        shards: Sequence[int] | None = None,
    ) -> None:
        pieces = shards or [env.tp.size] * len(out_features)
        lengths = [divide(out, n, "out_features") for out, n in zip(out_features, pieces, strict=True)]

        def slots(tail: tuple[int, ...]) -> list[Slot]:
            made, target = [], 0
            for total, n, length in zip(out_features, pieces, lengths, strict=True):
                start = env.tp.rank * n // env.tp.size * length
                made.append(Slot((total, *tail), dim=0, source=(start, start + length), target=target))
                target += length
            return made

        def param(*tail: int) -> Param:
            return Param(torch.empty(sum(lengths), *tail, dtype=env.dtype, device=env.device), slots(tail))

        super().__init__(param(in_features), param() if bias else None, env)
        self.split_sizes = lengths

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features] -> [T, sum(split_sizes)]"""
        return self.multiply(x, self.bias)


class RowLinear(Linear):
    """One projection whose input is split over the ranks; the partial products are summed over the group."""

    def __init__(self, in_features: int, out_features: int, env: ModelEnv, *, bias: bool = False) -> None:
        length = divide(in_features, env.tp.size, "in_features")
        start = env.tp.rank * length
        slot = Slot((out_features, in_features), dim=1, source=(start, start + length), target=0)
        weight = Param(torch.empty(out_features, length, dtype=env.dtype, device=env.device), (slot,))
        super().__init__(weight, whole((out_features,), env.dtype, env.device) if bias else None, env)
        self._tp = env.tp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features / tp_size] -> [T, out_features], the same on every rank"""
        bias = self.bias if self._tp.rank == 0 else None  # once in the sum
        return self._tp.comm.all_reduce(self.multiply(x, bias))
