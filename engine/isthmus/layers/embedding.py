"""The vocabulary matrix: token embedding, logits, or both when they are tied."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from isthmus.layers.env import ModelEnv
from isthmus.layers.linear import PackedWeight
from isthmus.layers.param import Param, Slot


class VocabEmbedding(nn.Module):
    """[vocab_size, hidden_size], rows split over the ranks; rows past the vocabulary are never read."""

    def __init__(self, vocab_size: int, hidden_size: int, env: ModelEnv) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self._tp = env.tp
        rows = -(-vocab_size // env.tp.size)
        self._start = min(env.tp.rank * rows, vocab_size)
        self._end = min(self._start + rows, vocab_size)
        slot = Slot((vocab_size, hidden_size), dim=0, source=(self._start, self._end), target=0)
        self.weight = Param(torch.empty(rows, hidden_size, dtype=env.dtype, device=env.device), (slot,))
        self._head = PackedWeight(self.weight, env)

    def pack_head(self, *, is_embedding: bool) -> None:
        """After loading: give the rows to the backend of `logits`, and free them if no ids are looked up here."""
        self._head.pack(self.weight)
        if not is_embedding:
            self.weight.data = self.weight.data.new_empty(0)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, hidden_size], the same on every rank"""
        if self._tp.size == 1:
            return F.embedding(input_ids, self.weight)
        mine = (input_ids >= self._start) & (input_ids < self._end)
        rows = F.embedding((input_ids - self._start).where(mine, 0), self.weight)
        return self._tp.comm.all_reduce(rows.where(mine.unsqueeze(-1), 0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] -> [R, vocab_size] in the model's dtype, the same on every rank"""
        local = self._head.apply(hidden, self.weight)
        if self._tp.size == 1:
            return local
        return self._tp.comm.all_gather(local, dim=-1)[:, : self.vocab_size]
