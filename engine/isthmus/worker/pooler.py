"""From the hidden states of steps to one vector a request, instead of a next token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from isthmus.pooling_params import PoolingParams
from isthmus.scheduler.output import NewRequestData
from isthmus.worker.sampling_rows import RowSet

if TYPE_CHECKING:
    from isthmus.worker.model_runner import Step


class Pooler:
    """Which rows are pooled, and what it has of their requests so far.

    to_host: Platform.async_to_host.  static_shapes: of the platform: hidden states come to the host whole then, as
    picking some of them on the device would be a program of its own for each number of tokens.
    """

    def __init__(
        self, max_num_rows: int, to_host: Callable[[torch.Tensor], Callable[[], torch.Tensor]], *, static_shapes: bool
    ) -> None:
        self._to_host = to_host
        self._static_shapes = static_shapes
        self._rows = RowSet(max_num_rows)
        self._requests: dict[str, _Pooled] = {}

    def add(self, row: int, data: NewRequestData) -> None:
        """A request begins in `row`, or goes on there after preemption."""
        self._rows.put(row, data.pooling is not None)
        if data.pooling is not None and data.request_id not in self._requests:
            self._requests[data.request_id] = _Pooled(data.pooling, data.num_prompt_tokens)

    def leave(self, row: int) -> None:
        """The row is free. The request may come back with blocks that the host kept, so what was summed is kept too."""
        self._rows.put(row, False)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._requests.pop(request_id, None)

    def is_pooled(self, rows: np.ndarray) -> np.ndarray:
        """Which of `rows` [R] are not sampled for: [R] bool."""
        mask = np.zeros(len(rows), dtype=bool)
        mask[self._rows.positions(rows)] = True
        return mask

    def pool(self, step: Step, hidden: torch.Tensor) -> dict[str, list[float]]:
        """The vectors of requests whose prompts end in this step. hidden [T, hidden_size]: of the step's tokens."""
        positions = self._rows.positions(step.rows).tolist()
        if not positions:
            return {}
        if self._static_shapes:
            hidden = self._to_host(hidden)()
        found: dict[str, torch.Tensor] = {}
        for position in positions:
            request_id = step.req_ids[position]
            begin, end = step.query_start_loc[position : position + 2].tolist()
            vector = self._requests[request_id].take(hidden[begin:end], int(step.num_computed[position]))
            if vector is not None:
                found[request_id] = vector
        if not found:
            return {}
        vectors = self._to_host(torch.stack(list(found.values())))()
        return dict(zip(found, vectors.tolist(), strict=True))


@dataclass(slots=True)
class _Pooled:
    """One request. total [hidden_size] float32: the sum over its first `num_summed` tokens. It is made of the request's
    own tokens alone, so neither its neighbours nor their number can change it.
    """

    params: PoolingParams
    num_tokens: int
    total: torch.Tensor | None = None
    num_summed: int = 0

    def take(self, hidden: torch.Tensor, num_computed: int) -> torch.Tensor | None:
        """The hidden states [n, hidden_size] of the tokens after the first `num_computed`; the vector [hidden_size] in
        float32, if these are the last.
        """
        is_last = num_computed + len(hidden) == self.num_tokens
        if not self.params.needs_all_tokens:
            return hidden[-1].float() if is_last else None
        if num_computed == 0:
            self.total, self.num_summed = None, 0
        if num_computed != self.num_summed:
            raise RuntimeError(f"a mean has {self.num_summed} tokens, and the step begins after {num_computed}")
        part = hidden.sum(0, dtype=torch.float32)
        self.total = part if self.total is None else self.total + part
        self.num_summed += len(hidden)
        return self.total / self.num_tokens if is_last else None
