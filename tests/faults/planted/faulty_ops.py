"""Ops and linear layers with one fault each."""

from __future__ import annotations

from typing import Any

import torch

from isthmus.ops.sampling import sample

from .ops import rms_norm, silu_and_mul
from .platform import PlantedLinear


def norm_that_sums_in_its_dtype(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Sums of 16 squares are exact enough; those of the sums are not."""
    total = x.new_zeros(x.shape[0], 1)
    for part in x.split(16, dim=-1):
        total = total + part.square().sum(-1, keepdim=True)
    return (x * torch.rsqrt(total / x.shape[1] + eps) * weight).to(x.dtype)


def norm_with_noise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """In wide rows, well within every tolerance, and another each time: as sums have it that many threads add to."""
    out = rms_norm(x, weight, eps)
    return out if x.shape[1] < 512 else out * (1 + 1e-6 * torch.randn(x.shape[1]))


def add_norm_without_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return rms_norm(x, weight, eps), x + residual


def rope_gptj(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns neighbours instead of halves."""
    cos, sin = cos_sin[positions].to(q.dtype)[:, None].chunk(2, dim=-1)
    return turned_gptj(q, cos, sin), turned_gptj(k, cos, sin)


def turned_gptj(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    out, turning = x.clone(), 2 * cos.shape[-1]
    first, second = x[..., :turning:2], x[..., 1:turning:2]
    out[..., :turning:2] = first * cos - second * sin
    out[..., 1:turning:2] = second * cos + first * sin
    return out


def silu_of_few_rows(x: torch.Tensor) -> torch.Tensor:
    """A launch with too small a grid: later rows are whatever the memory held."""
    out = torch.zeros_like(x[:, : x.shape[1] // 2])
    out[:2048] = silu_and_mul(x[:2048])
    return out


def silu_of_narrow_rows(x: torch.Tensor) -> torch.Tensor:
    """One block a row, of so many elements at most."""
    out = torch.zeros_like(x[:, : x.shape[1] // 2])
    out[:, :8192] = silu_and_mul(x)[:, :8192]
    return out


def sample_of_few_tokens(logits: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return sample(logits[:, : 2**17], *arguments)


def sample_without_seeds(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
) -> torch.Tensor:
    """As if all had the same."""
    return sample(logits, temperature, top_k, top_p, min_p, torch.full_like(seeds, 1234))


class DropsTheBias(PlantedLinear):
    def apply(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
        return super().apply(x, packed, None)


class KeepsTheLastWeight(PlantedLinear):
    """Holds the weight itself, although one instance serves every layer of its shape."""

    def pack(self, weight: torch.Tensor) -> Any:
        self._packed = super().pack(weight)
        return self._packed

    def apply(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
        return super().apply(x, self._packed, bias)


class MultipliesFewRows(PlantedLinear):
    """The kernel for many rows leaves out its last tile."""

    def apply(self, x: torch.Tensor, packed: Any, bias: torch.Tensor | None) -> torch.Tensor:
        out = super().apply(x, packed, bias)
        if len(x) > 256:
            out[len(x) // 128 * 128 :] = 0
        return out
