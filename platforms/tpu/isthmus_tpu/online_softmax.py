"""Attention to a paged cache in plain torch, for programs whose shapes are fixed: no shape depends on a length.

Queries are cut into tiles of one request each. All tiles go through their keys together, some blocks at a time, and
keep a running maximum and a running sum (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), so
memory does not grow with the context. How often the body runs is a number on the device; what runs it is up to the
driver, so that a loop can be a Python loop, or one of a compiled program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from isthmus.platforms import AttentionSpec

Tensors = tuple[torch.Tensor, ...]
Body = Callable[[torch.Tensor, Tensors, Tensors], Tensors]
"""`(iteration [] int32, carry, constants) -> carry`, of the same shapes and dtypes."""
Loop = Callable[[torch.Tensor, Body, Tensors, Tensors], Sequence[torch.Tensor]]
"""`(count [1] int32, body, carry, constants) -> carry` after `count` iterations."""

MASKED = -1e30
"""A score that no key reaches. Finite: a row without visible keys gives numbers that nobody reads, and never NaN."""
KEYS_PER_ITERATION = 128
"""Enough for the matrix units, and few enough to hold for every tile at once."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """N tiles of t queries over T tokens, R requests with tables of B blocks. All int32 on the device.

    tokens [N, t]: place of each query in the batch, 0 = padding.
    positions [N, t]: place of each query in its sequence, -1 = padding.
    requests [N]: whose queries they are.
    first_blocks [N]: first column of the table that any of the tile's queries sees.
    num_iterations [1]: enough for the tile with the most blocks.
    places [T]: tile * t + row of each token, 0 = padding.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    requests: torch.Tensor
    first_blocks: torch.Tensor
    num_iterations: torch.Tensor
    places: torch.Tensor


def python_loop(count: torch.Tensor, body: Body, carry: Tensors, constants: Tensors) -> Tensors:
    """For tensors that are computed at once."""
    for iteration in torch.arange(int(count), dtype=torch.int32):
        carry = body(iteration.to(count.device), carry, constants)
    return carry


def blocks_per_iteration(block_size: int) -> int:
    return max(1, KEYS_PER_ITERATION // block_size)


def write(cache: torch.Tensor, x: torch.Tensor, slots: torch.Tensor) -> None:
    """cache [num_blocks, block_size, K, D] <- x [T, K, D] at slots [T]; padding, -1, writes zeros to the null block,
    which holds nothing else.

    Two indices, no view of the cache: only so is a compiled program allowed to write in place.
    """
    is_real = slots >= 0
    slots = torch.where(is_real, slots, 0)
    values = torch.where(is_real[:, None, None], x, 0).to(cache.dtype)
    block_size = cache.shape[1]
    cache.index_put_((slots // block_size, slots % block_size), values)


def attend(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    tiles: Tiles,
    spec: AttentionSpec,
    loop: Loop,
) -> torch.Tensor:
    """q [T, H, D], caches [num_blocks, block_size, K, D], block_table [R, B] int32 -> [T, H, D] in q's dtype.

    Scores and sums are float32.
    """
    num_tiles, rows = tiles.tokens.shape
    group = spec.num_heads // spec.num_kv_heads
    queries = q[tiles.tokens].float().view(num_tiles, rows, spec.num_kv_heads, group, spec.head_dim)
    queries = (queries * spec.scale).permute(0, 2, 3, 1, 4).flatten(2, 3)
    statistics = (num_tiles, spec.num_kv_heads, group * rows, 1)
    carry = (
        torch.full(statistics, MASKED, dtype=torch.float32, device=q.device),
        torch.zeros(statistics, dtype=torch.float32, device=q.device),
        torch.zeros_like(queries),
    )
    constants = (
        queries,
        tiles.positions,
        block_table[tiles.requests],
        tiles.first_blocks,
        key_cache,
        value_cache,
    )
    _, total, weighted = loop(tiles.num_iterations, _body(spec), carry, constants)
    out = (weighted / total).unflatten(2, (group, rows)).permute(0, 3, 1, 2, 4)
    return out.reshape(-1, spec.num_heads, spec.head_dim)[tiles.places].to(q.dtype)


def _body(spec: AttentionSpec) -> Body:
    """One iteration: the next blocks of every tile."""
    width, size = blocks_per_iteration(spec.block_size), spec.block_size

    def body(iteration: torch.Tensor, carry: Tensors, constants: Tensors) -> Tensors:
        maximum, total, weighted = carry
        queries, positions, tables, first_blocks, key_cache, value_cache = constants
        next_columns = torch.arange(width, dtype=torch.int32, device=queries.device)
        in_block = torch.arange(size, dtype=torch.int32, device=queries.device)
        columns = first_blocks[:, None] + iteration * width + next_columns
        blocks = tables.gather(1, columns.clamp(max=tables.shape[1] - 1).long())
        keys = (columns[:, :, None] * size + in_block).flatten(1)
        k = key_cache[blocks].flatten(1, 2).float().permute(0, 2, 3, 1)
        v = value_cache[blocks].flatten(1, 2).float().permute(0, 2, 1, 3)
        scores = torch.matmul(queries, k)
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        scores = torch.where(_visible(positions, keys, spec)[:, None], scores, MASKED)
        new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        weights, decay = torch.exp(scores - new_maximum), torch.exp(maximum - new_maximum)
        return (
            new_maximum,
            total * decay + weights.sum(-1, keepdim=True),
            weighted * decay + torch.matmul(weights, v),
        )

    return body


def _visible(positions: torch.Tensor, keys: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """positions [N, t], keys [N, S], both places in a sequence -> [N, group * t, S] bool"""
    distance = positions[:, :, None] - keys[:, None, :]
    visible = distance >= 0
    if spec.sliding_window is not None:
        visible &= distance < spec.sliding_window
    return visible.repeat(1, spec.num_heads // spec.num_kv_heads, 1)
