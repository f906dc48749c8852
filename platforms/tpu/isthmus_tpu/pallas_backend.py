"""The Pallas kernel as an attention backend: layout, limits and tiling, whatever drives it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from isthmus.platforms import AttentionBackend, AttentionSpec, CacheTensor, DeviceInfo, GraphSupport, KVCacheLayout
from isthmus_tpu.pallas_attention import LANES, Tiling, default_tiling


class PallasBackend(AttentionBackend):
    """Cache: K and V apart, each [num_blocks, num_kv_heads, block_size, D], with D rounded up to the 128 lanes."""

    name: ClassVar[str] = "pallas"
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS
    interpret: ClassVar[bool] = False
    """Whether the kernel runs in Pallas's interpreter, which any JAX device has, instead of on a TPU."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self.head_dim = -(-spec.head_dim // LANES) * LANES

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        if spec.mla_rank is not None:
            return "pallas has no MLA"
        if spec.sinks:
            return "pallas has no attention sinks"
        rows = 32 // spec.kv_cache_dtype.itemsize
        if spec.block_size % rows:
            return f"block_size={spec.block_size} is not a multiple of {rows}, the rows of a {spec.kv_cache_dtype} tile"
        return None

    def kv_cache_layout(self, num_blocks: int) -> KVCacheLayout:
        s = self.spec
        one = CacheTensor((num_blocks, s.num_kv_heads, s.block_size, self.head_dim), s.kv_cache_dtype, block_dim=0)
        return KVCacheLayout((one, one))

    def tiling(self, *, decode: bool) -> Tiling:
        """What the kernel runs with on this spec."""
        s = self.spec
        itemsize = s.kv_cache_dtype.itemsize
        return default_tiling(s.num_heads, s.num_kv_heads, self.head_dim, s.block_size, itemsize, decode=decode)

    def options(self, *, decode: bool) -> dict[str, Any]:
        """Of the kernel, besides its arrays. decode: no request has more than one token."""
        s = self.spec
        return {
            "scale": s.scale,
            "sliding_window": s.sliding_window,
            "soft_cap": s.soft_cap,
            "tiling": self.tiling(decode=decode),
            "interpret": self.interpret,
        }

    def widened(self, x: torch.Tensor) -> torch.Tensor:
        """[T, heads, head_dim] -> [T, heads, D]; zeros change no score, and their part of the output is cut off."""
        return x if self.head_dim == x.shape[-1] else F.pad(x, (0, self.head_dim - x.shape[-1]))
