"""What the engine would run on a platform: its choices for a layer, made as the worker makes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from isthmus.config.engine import all_settings
from isthmus.config.kwargs import from_kwargs
from isthmus.conformance.target import Target
from isthmus.ops.registry import BoundOps
from isthmus.platforms import AttentionBackend, AttentionSpec, LinearBackend, LinearSpec


def compared_dtypes(target: Target) -> tuple[torch.dtype, ...]:
    """The preferred dtype, and float32 where the device has it."""
    preferred = target.dtypes[:1]
    return tuple(dict.fromkeys((*preferred, *(dtype for dtype in target.dtypes if dtype == torch.float32))))


def selected_ops(target: Target) -> BoundOps:
    """The provider of every op."""
    return target.registry.bind_ops(target.platform.kernel_priority(), None, target.platform.refused_native)


def selected_linear(target: Target, spec: LinearSpec) -> LinearBackend:
    """The backend of a linear layer. Raises KernelError if there is none."""
    return target.registry.select_linear(spec, target.info, _order(target, "linear")).backend(spec)


def selected_attention(target: Target, spec: AttentionSpec) -> type[AttentionBackend]:
    """The backend of an attention layer. Raises KernelError if there is none."""
    order = _order(target, "attention")
    refused = target.platform.refused_native
    return target.registry.select_attention(spec, target.info, order, target.attention, refused).backend


def attention_spec(
    target: Target, dtype: torch.dtype, *, num_heads: int, num_kv_heads: int, head_dim: int
) -> AttentionSpec:
    """Plain attention over blocks of the platform's own size."""
    defaults = target.platform.config_defaults(from_kwargs("any", device=target.name))
    block_size = defaults.get("cache.block_size", all_settings()["cache.block_size"].spec.fallback)
    assert isinstance(block_size, int)
    return AttentionSpec(num_heads, num_kv_heads, head_dim, block_size, dtype, dtype, scale=head_dim**-0.5)


def _order(target: Target, kind: str) -> Sequence[str]:
    priority = target.platform.kernel_priority()
    return priority.get(kind, priority.get("*", ()))
