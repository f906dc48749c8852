"""Batches for ragged paged attention, and what it must give: float64, numpy, one request at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Batch:
    """q [T, H, D], caches [P, K, S, D], all float64; the rest int32 as the kernel takes it.

    Every slot that no request owns is nan, in its last page too, and so are the pages that nobody has.
    """

    q: np.ndarray
    key_cache: np.ndarray
    value_cache: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: np.ndarray

    def attended(self, *, sliding_window: int | None = None, soft_cap: float | None = None) -> np.ndarray:
        """[T, H, D] float64; zero where no request has a token."""
        out = np.zeros_like(self.q)
        for req, length in enumerate(self.seq_lens):
            start, end = self.query_start_loc[req : req + 2]
            if end > start:
                keys, values = (self._sequence(cache, req, length) for cache in (self.key_cache, self.value_cache))
                out[start:end] = _attend(self.q[start:end], keys, values, self.scale, sliding_window, soft_cap)
        return out

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    def _sequence(self, cache: np.ndarray, req: int, length: int) -> np.ndarray:
        """[length, K, D]"""
        pages = cache[self.block_table[req]].swapaxes(1, 2)
        return pages.reshape(-1, *pages.shape[2:])[:length]


def make_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    num_heads: int = 8,
    num_kv_heads: int = 2,
    head_dim: int = 128,
    page_size: int = 16,
    padding_tokens: int = 0,
    spare_columns: int = 0,
    seed: int = 0,
) -> Batch:
    """Requests with shuffled pages. Page 0 is nobody's: what tables name past a sequence, as in the engine."""
    rng = np.random.default_rng(seed)
    counts = [-(-length // page_size) for length in seq_lens]
    table = np.zeros((len(seq_lens), max(counts) + spare_columns), np.int32)
    pages = rng.permutation(sum(counts)) + 1
    key_cache = np.full((sum(counts) + 2, num_kv_heads, page_size, head_dim), np.nan)
    value_cache = key_cache.copy()
    for req, (length, count) in enumerate(zip(seq_lens, counts, strict=True)):
        table[req, :count], pages = pages[:count], pages[count:]
        for position in range(length):
            where = table[req, position // page_size], slice(None), position % page_size
            key_cache[where] = rng.standard_normal((num_kv_heads, head_dim))
            value_cache[where] = rng.standard_normal((num_kv_heads, head_dim))
    query_start_loc = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    q = rng.standard_normal((int(query_start_loc[-1]) + padding_tokens, num_heads, head_dim))
    return Batch(q, key_cache, value_cache, query_start_loc, np.array(seq_lens, np.int32), table)


def _attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, sliding_window: int | None, soft_cap: float | None
) -> np.ndarray:
    """q [n, H, D], the last n of the sequence; k, v [L, K, D]"""
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("qhd,khd->hqk", q, k.repeat(group, 1)) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    distance = np.arange(len(k) - len(q), len(k))[:, None] - np.arange(len(k))
    visible = (distance >= 0) & (distance < (sliding_window or len(k)))
    weights = np.where(visible, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v.repeat(group, 1))
