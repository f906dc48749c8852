"""Cutting a step's queries into tiles, on the host: how many there are depends on the step's shape alone."""

from __future__ import annotations

import numpy as np
import torch

from isthmus.platforms import AttentionBatch
from isthmus_tpu.online_softmax import Tiles, blocks_per_iteration

ROWS = 16
"""Queries of a tile where there are longer ones: a request wastes at most 15."""


def num_rows(max_query_len: int) -> int:
    """Queries of a tile."""
    return 1 if max_query_len == 1 else ROWS


def num_tiles(num_tokens: int, num_reqs: int, rows: int) -> int:
    """Enough, however the tokens are shared out: every request fills all of its tiles but one."""
    return (num_tokens + (rows - 1) * num_reqs) // rows


def make_tiles(batch: AttentionBatch, num_tokens: int, block_size: int, window: int | None) -> Tiles:
    """The tiles of a step of `num_tokens`, padding included, on the host.

    window: the sliding window of the layers, None = all keys are visible.
    """
    rows = num_rows(batch.max_query_len)
    starts = batch.query_start_loc_np[: batch.num_reqs + 1].astype(np.int64)
    query_lens = np.diff(starts)
    computed = batch.seq_lens_np[: batch.num_reqs] - query_lens
    per_request = -(-query_lens // rows)
    used = int(per_request.sum())
    count = num_tiles(num_tokens, batch.num_reqs, rows)

    requests = np.zeros(count, np.int32)
    requests[:used] = np.repeat(np.arange(batch.num_reqs), per_request)
    owner = requests[:used]
    first_tile = np.concatenate([[0], np.cumsum(per_request)[:-1]])
    index = (np.arange(used) - first_tile[owner])[:, None] * rows + np.arange(rows)
    is_query = index < query_lens[owner, None]
    tokens, positions = np.zeros((count, rows), np.int32), np.full((count, rows), -1, np.int32)
    tokens[:used] = np.where(is_query, starts[owner, None] + index, 0)
    positions[:used] = np.where(is_query, computed[owner, None] + index, -1)

    places = np.zeros(num_tokens, np.int32)
    tile, row = np.nonzero(is_query)
    places[tokens[tile, row]] = tile * rows + row

    first_blocks = np.zeros(count, np.int32)
    if window is not None:
        first_blocks[:used] = np.maximum(positions[:used, 0] - window + 1, 0) // block_size
    num_blocks = positions.max(axis=1) // block_size + 1 - first_blocks
    # At least one: a tile that saw nothing at all would divide by a sum of nothing.
    num_iterations = -(-max(int(num_blocks.max(initial=0)), 1) // blocks_per_iteration(block_size))
    return Tiles(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        requests=torch.from_numpy(requests),
        first_blocks=torch.from_numpy(first_blocks),
        num_iterations=torch.tensor([num_iterations], dtype=torch.int32),
        places=torch.from_numpy(places),
    )
