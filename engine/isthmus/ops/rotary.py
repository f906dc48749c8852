"""Rotary position embedding, the "neox" pairing: element i turns with element i + rotary_dim / 2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from isthmus.ops.registry import Op

TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 3e-2)}
CASES = ((1, 4, 2, 16, 16), (7, 4, 4, 32, 32), (33, 9, 3, 64, 64), (5, 2, 1, 32, 16), (0, 4, 2, 16, 16))
"""(T, H, K, head_dim, rotary_dim)"""
NUM_POSITIONS = 128


def rope(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first rotary_dim elements of every head of q and k; the rest passes through.

    positions [T] int64.  q [T, H, D], k [T, K, D]: may be strided views with a contiguous last dimension.
    cos_sin [P, rotary_dim] float32: row p is [cos | sin] of position p, rounded to q.dtype before the products.
    Returns new tensors; the inputs are not changed.
    """
    cos, sin = cos_sin.index_select(0, positions).to(q.dtype).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    parts = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(parts if rest.shape[-1] == 0 else [*parts, rest], dim=-1)


def _inputs(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    for tokens, heads, kv_heads, head_dim, rotary_dim in CASES:
        positions = torch.randint(0, NUM_POSITIONS, (tokens,), generator=generator)
        # One fused projection, cut into views: what the layers really pass.
        qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, generator=generator).to(device, dtype)
        q = qkv[:, : heads * head_dim].view(tokens, heads, head_dim)
        k = qkv[:, heads * head_dim : (heads + kv_heads) * head_dim].view(tokens, kv_heads, head_dim)
        frequencies = 1.0 / 10000 ** (torch.arange(0, rotary_dim, 2).float() / rotary_dim)
        angles = torch.arange(NUM_POSITIONS).float()[:, None] * frequencies
        yield positions.to(device), q, k, torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


ROPE = Op("rope", rope, _inputs, TOLERANCES)
