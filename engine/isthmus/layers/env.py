"""What a model is built with (`ModelEnv`) and what a step reads (`ForwardContext`). Both are passed, never global."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from isthmus.ops.registry import BoundOps
from isthmus.platforms import (
    AttentionBackend,
    AttentionSpec,
    BatchShape,
    Communicator,
    GraphSupport,
    LinearBackend,
    LinearSpec,
    SingleCommunicator,
)
from isthmus.platforms.linear import NativeLinearBackend


@dataclass(frozen=True, slots=True)
class ParallelGroup:
    """This process's place in a group and the collectives of it."""

    rank: int = 0
    size: int = 1
    comm: Communicator = field(default_factory=SingleCommunicator)


class AttentionGroups:
    """The distinct attention specs of a model. Layers with the same spec share one backend and one metadata a step."""

    def __init__(self, make_backend: Callable[[AttentionSpec], AttentionBackend]) -> None:
        self._make = make_backend
        self.specs: list[AttentionSpec] = []
        self.backends: list[AttentionBackend] = []
        self.layer_groups: list[int] = []
        """layer index -> group index"""

    def add_layer(self, spec: AttentionSpec) -> tuple[int, int, AttentionBackend]:
        """Register the next layer; returns (layer index, group index, backend)."""
        if spec not in self.specs:
            self.backends.append(self._make(spec))
            self.specs.append(spec)
        group = self.specs.index(spec)
        self.layer_groups.append(group)
        return len(self.layer_groups) - 1, group, self.backends[group]


@dataclass(frozen=True, slots=True)
class ModelEnv:
    """Everything that a layer needs besides the model's own numbers."""

    ops: BoundOps
    attention: AttentionGroups
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    block_size: int
    linear: Callable[[LinearSpec], LinearBackend] = NativeLinearBackend
    device: torch.device = field(default_factory=lambda: torch.device("meta"))
    tp: ParallelGroup = field(default_factory=ParallelGroup)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Every tensor of a step that is not an activation, and what a graph policy has to know of it.

    kv_caches: per layer, the tensors of the backend's layout.  metadata: per attention group, what its
    `build_metadata` returned.  shape: of the step, padding included.  graph_support: the least of the attention
    backends.
    """

    kv_caches: tuple[tuple[torch.Tensor, ...], ...]
    metadata: tuple[Any, ...]
    shape: BatchShape
    graph_support: GraphSupport
