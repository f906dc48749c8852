"""The native ops, attention and linear layers: what any platform runs on before it has kernels."""

from __future__ import annotations

from isthmus.ops.activation import GELU_AND_MUL, SILU_AND_MUL
from isthmus.ops.norm import FUSED_ADD_RMS_NORM, RMS_NORM
from isthmus.ops.registry import KernelRegistry
from isthmus.ops.rotary import ROPE
from isthmus.ops.sampling import SAMPLE
from isthmus.platforms.linear import NativeLinearBackend
from isthmus.platforms.native_attention import NativeAttentionBackend

NATIVE_OPS = (RMS_NORM, FUSED_ADD_RMS_NORM, ROPE, SILU_AND_MUL, GELU_AND_MUL, SAMPLE)


def register_native(registry: KernelRegistry) -> None:
    """Define all ops and add the native backends. Call once, before any `add_op`."""
    for op in NATIVE_OPS:
        registry.define(op)
    registry.add_attention(NativeAttentionBackend)
    registry.add_linear(NativeLinearBackend)
