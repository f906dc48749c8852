"""Every op in a form of its own. `sample` is the native one: its tokens must be equal, whatever the algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from isthmus.ops.registry import OpFn
from isthmus.ops.sampling import sample


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos_sin[positions].to(q.dtype)[:, None].chunk(2, dim=-1)
    return turned(q, cos, sin), turned(k, cos, sin)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    out, half = x.clone(), cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    out[..., :half] = first * cos - second * sin
    out[..., half : 2 * half] = second * cos + first * sin
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return (gate.float() * torch.sigmoid(gate.float())).to(x.dtype) * up


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate.float(), approximate="tanh").to(x.dtype) * up


OPS: Mapping[str, OpFn] = MappingProxyType(
    {op.__name__: op for op in (rms_norm, fused_add_rms_norm, rope, silu_and_mul, gelu_and_mul, sample)}
)
