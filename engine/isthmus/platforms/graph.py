"""The capture or compile policy of a platform: how a step is padded, wrapped and warmed up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Forward = Callable[..., Any]
"""`(input_ids [T], positions [T], ctx: ForwardContext) -> hidden [T, hidden_size]`

`ctx.shape` is the BatchShape that `pad` gave; `ctx.graph_support` the least of the attention backends' `GraphSupport`.
"""


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What a captured or compiled step is keyed by."""

    num_tokens: int
    num_reqs: int
    max_query_len: int


class GraphBackend(ABC):
    """Decides padding and owns the callable that runs a step, grad mode included."""

    @abstractmethod
    def pad(self, shape: BatchShape) -> BatchShape:
        """The shape to run `shape` at: each field at least as large. Eager platforms return it unchanged."""

    @abstractmethod
    def wrap(self, forward: Forward) -> Forward:
        """A callable with the same signature: eager, capture and replay keyed by BatchShape, compiled, ...

        What it gives may be overwritten by the next step.
        """

    def warmup_shapes(self) -> Sequence[BatchShape]:
        """Shapes to run at start, largest first; `pad` leaves each as it is. Default: none.

        The first two are also run before the KV cache is sized, on another one: what they take stays out of it.
        """
        return ()


class EagerBackend(GraphBackend):
    """No padding, no capture."""

    def pad(self, shape: BatchShape) -> BatchShape:
        return shape

    def wrap(self, forward: Forward) -> Forward:
        return torch.inference_mode()(forward)
