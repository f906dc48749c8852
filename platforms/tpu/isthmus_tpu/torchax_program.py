"""A step as a pure function of arrays: what JAX needs, made of a forward that fills caches in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torchax.interop import jax_view

from isthmus.platforms.attention import KVCache
from isthmus.platforms.graph import Forward

Weights = Mapping[str, torch.Tensor]
Caches = tuple[KVCache, ...]
PureStep = Callable[..., tuple[Any, Any]]
"""A function of jax arrays, named as the tensors that they stand for; gives (hidden [T, hidden_size], caches)."""


def pure_step(forward: Forward, ctx: Any) -> PureStep:
    """`(caches, input_ids [T], positions [T], metadata) -> (hidden, caches)`; weights are those that `forward` holds.

    ctx: a ForwardContext as `forward` takes it; all but its `kv_caches` and `metadata` stays as it is here.
    """
    return jax_view(lambda *arguments: _run(forward, ctx, *arguments))


def pure_step_of_weights(module: nn.Module, ctx: Any) -> PureStep:
    """`(weights, caches, input_ids, positions, metadata) -> (hidden, caches)`, for a module that holds none.

    weights: as `weights_of` gives them.
    """

    def step(weights: Weights, *arguments: Any) -> tuple[torch.Tensor, Caches]:
        def forward(*inputs: Any) -> torch.Tensor:
            hidden: torch.Tensor = functional_call(module, dict(weights), inputs)
            return hidden

        return _run(forward, ctx, *arguments)

    return jax_view(step)


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by name; one that has two names appears under the first."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _run(
    forward: Forward,
    ctx: Any,
    caches: Caches,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    metadata: tuple[Any, ...],
) -> tuple[torch.Tensor, Caches]:
    """`forward` writes to the caches that it is given; afterwards they stand for the new arrays."""
    with torch.no_grad():
        hidden = forward(input_ids, positions, dataclasses.replace(ctx, kv_caches=caches, metadata=metadata))
    return hidden, caches
