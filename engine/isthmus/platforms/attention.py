"""The attention contract: a backend owns its cache layout, its metadata and its kernel.

Letters: T tokens of a step, R requests, B blocks a request, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from isthmus.platforms.facts import DeviceInfo

KVCache = tuple[torch.Tensor, ...]
"""One layer's cache: the tensors of the backend's `KVCacheLayout`, in its order."""


class GraphSupport(enum.IntEnum):
    """Which steps a captured graph may contain this attention in."""

    NEVER = 0
    UNIFORM_DECODE = 1
    ALWAYS = 2


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One kind of attention layer of a model, after sharding.

    scale: factor on q·k before the softmax.  sliding_window: a query at position i sees keys j with
    i - window < j <= i; None = all.  soft_cap: logits become cap * tanh(logits / cap).
    sinks: one learned logit a head joins the softmax.  mla_rank: latent rank of MLA, None = ordinary K and V.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    mla_rank: int | None = None


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One storage of a layer's cache. `block_dim` is the dimension that counts blocks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    block_dim: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """What to allocate for one layer. The engine zero-fills it, copies and swaps blocks along `block_dim`."""

    tensors: tuple[CacheTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's shape, on the device, with host copies of what a planner needs.

    query_start_loc [R+1] int32: request r owns tokens [query_start_loc[r], query_start_loc[r+1]).
    seq_lens [R] int32: tokens in the cache after this step, so the query's last token is at seq_lens[r] - 1.
    block_table [R, B] int32: block ids; entries past the sequence are 0, the null block, always valid memory.
    slot_mapping [T] int64: block_id * block_size + offset of each token, -1 = padding, not to be written.
    query_start_loc_np, seq_lens_np: the same numbers on the host (int32).
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc_np: np.ndarray
    seq_lens_np: np.ndarray


class AttentionBackend(ABC):
    """Paged attention of one platform. One instance per `AttentionSpec`."""

    name: ClassVar[str]
    graph_support: ClassVar[GraphSupport] = GraphSupport.NEVER

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self.spec = spec
        self.device = device

    @classmethod
    @abstractmethod
    def unsupported_reason(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        """Why this backend cannot serve `spec` on `info`, in words for the user; None if it can."""

    @abstractmethod
    def kv_cache_layout(self, num_blocks: int) -> KVCacheLayout:
        """The storages of one layer for `num_blocks` blocks (the null block included)."""

    @abstractmethod
    def build_metadata(self, batch: AttentionBatch) -> Any:
        """Once a step, shared by the layers of this spec. Same `BatchShape` => same tensor addresses."""

    @abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: Any
    ) -> torch.Tensor:
        """Write k, v [T, K, D] of the *whole* batch at slot_mapping, then attend with q [T, H, D]; returns [T, H, D].

        All writes come before any read: a request may share blocks that a neighbour fills in this very step.
        """

    def copy_blocks(self, kv_cache: KVCache, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy blocks src[i] -> dst[i] (int64 ids) inside one layer's cache. Default: along block_dim."""
        for tensor, spec in zip(kv_cache, self.kv_cache_layout(1).tensors, strict=True):
            tensor.index_copy_(spec.block_dim, dst, tensor.index_select(spec.block_dim, src))

    def swap_blocks(self, src_cache: KVCache, dst_cache: KVCache, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy blocks between device and host caches of one layer. Default: along block_dim."""
        layout = self.kv_cache_layout(1).tensors
        for source, target, spec in zip(src_cache, dst_cache, layout, strict=True):
            moved = source.index_select(spec.block_dim, src.to(source.device)).to(target.device)
            target.index_copy_(spec.block_dim, dst.to(target.device), moved)
