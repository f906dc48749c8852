"""The contract of matrix multiplication with fixed weights: a backend may keep a weight in a form of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from isthmus.platforms.facts import DeviceInfo


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One weight [out_features, in_features] of `dtype`, after sharding."""

    in_features: int
    out_features: int
    dtype: torch.dtype


class LinearBackend(ABC):
    """How linear layers of one spec multiply. One instance per `LinearSpec`; holds no weights."""

    name: ClassVar[str]

    def __init__(self, spec: LinearSpec) -> None:
        self.spec = spec

    @classmethod
    @abstractmethod
    def unsupported_reason(cls, spec: LinearSpec, info: DeviceInfo) -> str | None:
        """Why this backend cannot serve `spec` on `info`, in words for the user; None if it can."""

    @abstractmethod
    def pack(self, weight: torch.Tensor) -> Any:
        """The backend's own form of weight [out, in]. Called once, after loading; `weight` may be freed then."""

    @abstractmethod
    def apply(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in] -> x @ weight.T + bias, [T, out]; x may have strided rows."""


class NativeLinearBackend(LinearBackend):
    """The weight as it is."""

    name: ClassVar[str] = "native"

    @classmethod
    def unsupported_reason(cls, spec: LinearSpec, info: DeviceInfo) -> str | None:
        return None

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def apply(self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, packed, bias)
