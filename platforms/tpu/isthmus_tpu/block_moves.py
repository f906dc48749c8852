"""Moving blocks of the cache with one program, however many they are."""

from __future__ import annotations

import numpy as np
import torch

from isthmus.platforms import AttentionBackend
from isthmus.platforms.attention import KVCache

BLOCKS_PER_COPY = 16
"""Blocks that one program moves; it runs as often as needed, so that only one is compiled for each kind of cache."""


class BlocksInPieces(AttentionBackend):
    """An attention backend whose storages have their blocks in dimension 0, and whose shapes must be few."""

    def copy_blocks(self, kv_cache: KVCache, src: torch.Tensor, dst: torch.Tensor) -> None:
        for sources, targets in _pieces(src, dst):
            for tensor in kv_cache:
                _put(tensor, targets.to(tensor.device), tensor[sources.to(tensor.device)])

    def swap_blocks(self, src_cache: KVCache, dst_cache: KVCache, src: torch.Tensor, dst: torch.Tensor) -> None:
        for sources, targets in _pieces(src, dst):
            for source, target in zip(src_cache, dst_cache, strict=True):
                moved = source[sources.to(source.device)].to(target.device)
                _put(target, targets.to(target.device), moved)


def _put(cache: torch.Tensor, blocks: torch.Tensor, values: torch.Tensor) -> None:
    cache.index_put_((blocks,), values)


def _pieces(src: torch.Tensor, dst: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Equally long parts of both lists of blocks, on the host; the last move fills the last part up."""
    if not len(src):
        return []
    moves = np.stack([src.cpu().numpy(), dst.cpu().numpy()])
    moves = np.pad(moves, ((0, 0), (0, -len(src) % BLOCKS_PER_COPY)), mode="edge")
    return [(part[0], part[1]) for part in torch.from_numpy(moves).split(BLOCKS_PER_COPY, dim=1)]
