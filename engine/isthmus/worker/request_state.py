"""One permanent row a request: what a step gathers its inputs from."""

from __future__ import annotations

import numpy as np

from isthmus.scheduler.output import NewRequestData


class RequestState:
    """Rows of host arrays; a request keeps its row from admission until it ends or is preempted.

    token_ids [rows, max_model_len + 1] int32: prompt and outputs.  num_tokens, num_prompt_tokens [rows] int32.
    block_tables: a table a block group, [rows, max_blocks] int32, 0 past the end.  num_blocks [rows] int32: entries of
    each of them.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, block_size: int, num_groups: int = 1) -> None:
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_num_reqs, max_model_len + 1), np.int32)
        self.num_tokens = np.zeros(max_num_reqs, np.int32)
        self.num_prompt_tokens = np.zeros(max_num_reqs, np.int32)
        self.block_tables = [np.zeros((max_num_reqs, max_blocks), np.int32) for _ in range(num_groups)]
        self.num_blocks = np.zeros(max_num_reqs, np.int32)
        self.rows: dict[str, int] = {}
        self._free_rows = list(range(max_num_reqs - 1, -1, -1))

    def add(self, data: NewRequestData) -> int:
        """Give the request a row and fill it."""
        row = self._free_rows.pop()
        self.rows[data.request_id] = row
        self.token_ids[row, : len(data.token_ids)] = data.token_ids
        self.num_tokens[row] = len(data.token_ids)
        self.num_prompt_tokens[row] = data.num_prompt_tokens
        self.num_blocks[row] = 0
        self.append_blocks(row, data.block_ids, *data.window_block_ids)
        return row

    def remove(self, request_id: str) -> int | None:
        """Free the row; None if the request has none (it never ran, or was preempted)."""
        row = self.rows.pop(request_id, None)
        if row is not None:
            for table in self.block_tables:
                table[row, : self.num_blocks[row]] = 0
            self._free_rows.append(row)
        return row

    def append_blocks(self, row: int, *block_ids: list[int]) -> None:
        """The tables grew: what each group's got."""
        at = int(self.num_blocks[row])
        end = at + len(block_ids[0])
        for table, added in zip(self.block_tables, block_ids, strict=True):
            table[row, at:end] = added
        self.num_blocks[row] = end

    def append_tokens(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """One sampled token for each of `rows`."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def replace_last_token(self, row: int, token_id: int) -> None:
        """The scheduler chose another token than the one that was sampled."""
        self.token_ids[row, self.num_tokens[row] - 1] = token_id
