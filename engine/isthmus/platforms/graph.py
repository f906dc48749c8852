"""The capture or compile policy of a platform: how a step is padded, wrapped and warmed up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Forward = Callable[..., Any]
"""`(input_ids [T], positions [T], ctx: ForwardContext) -> hidden [T, hidden_size]`

`ctx.shape` is the BatchShape that `pad` gave; `ctx.graph_support` the least of the attention backends' `GraphSupport`.
"""
ComputeLogits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""`(hidden [T, hidden_size], rows [N] int64) -> logits [N, vocab_size]` of these rows."""


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

    def wrap_logits(self, compute_logits: ComputeLogits) -> ComputeLogits:
        """The same for what follows `wrap`'s callable in a step that samples. Default: eager, without gradients."""
        return torch.inference_mode()(compute_logits)

    def warmup_shapes(self) -> Sequence[BatchShape]:
        """Shapes to run at start, largest first; `pad` leaves each as it is. Default: none.

        The first two are also run before the KV cache is sized, on another one: what they take stays out of it.
        """
        return ()

    def warmed_up(self) -> None:
        """Called when all of them have run: what comes now is traffic."""
        return None

    def counters(self) -> Mapping[str, float]:
        """Figures that only grow, by name, for the engine's metrics. Default: none."""
        return {}


class EagerBackend(GraphBackend):
    """No padding, no capture.

    inference_mode: makes the context of each step, one that decorates, as torch's own and `torch.no_grad` do.
    """

    def __init__(self, inference_mode: Callable[[], Any] = torch.inference_mode) -> None:
        self._inference_mode = inference_mode

    def pad(self, shape: BatchShape) -> BatchShape:
        return shape

    def wrap(self, forward: Forward) -> Forward:
        wrapped: Forward = self._inference_mode()(forward)
        return wrapped

    def wrap_logits(self, compute_logits: ComputeLogits) -> ComputeLogits:
        wrapped: ComputeLogits = self._inference_mode()(compute_logits)
        return wrapped
