"""What the loader and the model runner ask of a model class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import nn

from isthmus.layers.env import ForwardContext, ModelEnv
from isthmus.layers.linear import Linear
from isthmus.models.spec import ModelSpec


class CausalLM(nn.Module, ABC):
    """A decoder-only language model, built as `Class(spec, env)`.

    stacked_params: part of a checkpoint name -> (name of the fused module, its slot).
    renamed_prefixes: prefix of checkpoint names -> ours.  skipped_prefixes: tensors this model has no use for.
    """

    stacked_params: ClassVar[Mapping[str, tuple[str, int]]] = MappingProxyType({})
    renamed_prefixes: ClassVar[Mapping[str, str]] = MappingProxyType({})
    skipped_prefixes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, spec: ModelSpec, env: ModelEnv) -> None:
        super().__init__()

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """input_ids [T] int64, positions [T] int64 -> hidden [T, hidden_size]; fills the caches of ctx."""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden_size] -> [R, vocab_size] in the model's dtype"""

    def pack(self) -> None:
        """Once, after loading: hand the weights of linear layers to their backends. A head of its own is the
        subclass's business.
        """
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
