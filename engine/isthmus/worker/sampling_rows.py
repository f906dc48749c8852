"""Per-row sampling state that only some rows have: who uses a feature, lists of token ids, banned sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.integer[Any]]

_NO_POSITIONS = np.empty(0, dtype=np.int64)
_ANY_TOKEN = -1


class RowSet:
    """The rows that use one feature. Costs nothing while there are none."""

    def __init__(self, max_num_rows: int) -> None:
        self._is_member = np.zeros(max_num_rows, dtype=bool)
        self._size = 0

    def put(self, row: int, is_member: bool) -> None:
        self._size += int(is_member) - int(self._is_member[row])
        self._is_member[row] = is_member

    def positions(self, rows: IntArray) -> IntArray:
        """Where in `rows` the members are, [M] int64."""
        if not self._size:
            return np.empty(0, dtype=np.int64)
        positions: IntArray = np.flatnonzero(self._is_member[rows])
        return positions


class TokenLists:
    """A list of token ids for each row that has one, with a number for each id."""

    def __init__(self, max_num_rows: int) -> None:
        self._rows = RowSet(max_num_rows)
        self._ids: dict[int, IntArray] = {}
        self._values: dict[int, npt.NDArray[np.float32]] = {}

    def put(self, row: int, token_ids: Sequence[int], values: Sequence[float] = ()) -> None:
        self._rows.put(row, len(token_ids) > 0)
        self._ids[row] = np.asarray(token_ids, dtype=np.int64)
        self._values[row] = np.asarray(values, dtype=np.float32)

    def flat(self, rows: IntArray, where: npt.NDArray[np.bool_] | None = None) -> FlatLists | None:
        """The lists of `rows` end to end, of those only where `where` [N] is true; None if there are none."""
        positions = self._rows.positions(rows)
        if where is not None and positions.size:
            positions = positions[where[positions]]
        if not positions.size:
            return None
        members = rows[positions].tolist()
        ids = [self._ids[row] for row in members]
        return FlatLists(
            positions=torch.from_numpy(np.repeat(positions, [len(part) for part in ids])),
            token_ids=torch.from_numpy(np.concatenate(ids)),
            values=torch.from_numpy(np.concatenate([self._values[row] for row in members])),
        )


@dataclass(frozen=True, slots=True)
class FlatLists:
    """Entry i: token_ids[i] at batch position positions[i], both [E] int64, with values[i] float32 if it has any."""

    positions: torch.Tensor
    token_ids: torch.Tensor
    values: torch.Tensor

    def index(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return self.positions.to(device), self.token_ids.to(device)


@dataclass(frozen=True, slots=True)
class TokenSequences:
    """Banned sequences of two or more tokens of one row: `prefixes` [W, L] right-aligned, `last_ids` [W].

    Places left of a shorter prefix hold a wildcard.
    """

    prefixes: IntArray
    last_ids: IntArray

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> TokenSequences:
        width = max(len(ids) for ids in sequences) - 1
        prefixes = np.full((len(sequences), width), _ANY_TOKEN, dtype=np.int64)
        for prefix, ids in zip(prefixes, sequences, strict=True):
            prefix[width - len(ids) + 1 :] = ids[:-1]
        return cls(prefixes, np.asarray([ids[-1] for ids in sequences], dtype=np.int64))

    def banned_after(self, tokens: IntArray) -> IntArray:
        """Ids that would complete a sequence after `tokens` [n]."""
        width = self.prefixes.shape[1]
        tail = np.full(width, _ANY_TOKEN - 1, dtype=np.int64)
        known = tokens[-width:]
        tail[width - len(known) :] = known
        matches = (self.prefixes == tail) | (self.prefixes == _ANY_TOKEN)
        banned: IntArray = self.last_ids[matches.all(axis=1)]
        return banned
