"""A step as kernels for ragged batches take it: without padding, int32, contiguous."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from isthmus.platforms import AttentionBatch


@dataclass(frozen=True, slots=True)
class RealBatch:
    """T real tokens and R requests that have some; padding of both kinds is at the end of a batch, and left out.

    slots [T] int32, none of them negative: kernels differ in what they do with -1, one writes before its buffer. Where
    the engine had one all the same, the token goes to slot 0, which is in the null block.
    query_start_loc, key_start_loc [R+1] int32: running sums of queries and of keys.  seq_lens [R] int32.
    block_table [R, B] int32, contiguous: kernels read it as if its rows were B apart.
    """

    slots: torch.Tensor
    query_start_loc: torch.Tensor
    key_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_tokens: int
    max_query_len: int
    max_seq_len: int

    @classmethod
    def of(cls, batch: AttentionBatch) -> RealBatch:
        """Plans on the host: the device is not waited for."""
        query_lens = np.diff(batch.query_start_loc_np[: batch.num_reqs + 1])
        num_reqs = int(np.flatnonzero(query_lens)[-1]) + 1
        seq_lens = batch.seq_lens_np[:num_reqs]
        key_start_loc = np.zeros(num_reqs + 1, np.int32)
        np.cumsum(seq_lens, out=key_start_loc[1:])
        device = batch.block_table.device
        return cls(
            slots=batch.slot_mapping[: batch.num_tokens].clamp(min=0).to(torch.int32),
            query_start_loc=batch.query_start_loc[: num_reqs + 1],
            key_start_loc=torch.from_numpy(key_start_loc).to(device, non_blocking=True),
            seq_lens=batch.seq_lens[:num_reqs],
            block_table=batch.block_table[:num_reqs].contiguous(),
            num_tokens=batch.num_tokens,
            max_query_len=int(query_lens.max()),
            max_seq_len=int(seq_lens.max()),
        )
