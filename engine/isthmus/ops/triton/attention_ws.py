"""Attention whose longer steps run `attention_ws_kernel`: backend "triton_ws", on architectures with a row for it.

Unverified on hardware: no platform chooses it unless it is asked for by name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from isthmus.ops.triton.arch import Arch
from isthmus.ops.triton.attention import TritonAttentionBackend, TritonMetadata
from isthmus.ops.triton.kernels.attention_ws import attention_ws_kernel
from isthmus.ops.triton.plan import Limits, Planner
from isthmus.ops.triton.tuning import DECODE, NARROW, PREFILL_WS, AttentionRow, find_row
from isthmus.platforms.attention import AttentionSpec, KVCache
from isthmus.platforms.facts import DeviceInfo

ALIGNMENT = 16
"""Bytes between what a descriptor describes, and where it starts."""


def triton_ws_attention(arch: Arch) -> type[TritonAttentionBackend] | None:
    """The backend to register for a device of `arch`; None if its tuning table has no row for the kernel."""
    return None if find_row(arch, PREFILL_WS, NARROW) is None else TritonWsAttentionBackend.on(arch)


class TritonWsAttentionBackend(TritonAttentionBackend):
    """Steps of decodes are those of "triton"; so are the cache and the work list.

    A value that is not finite is written as 0, so that it stays with the request that computed it: its keys are written
    as they are.
    """

    name: ClassVar[str] = "triton_ws"
    kinds: ClassVar[tuple[str, ...]] = (DECODE, PREFILL_WS)
    needs_finite_values: ClassVar[bool] = True

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        row = find_row(cls.arch, PREFILL_WS, NARROW)
        if row is None:
            return f"no tuning row of triton_ws for {cls.arch.name}"
        if spec.dtype.itemsize != 2:
            return f"triton_ws multiplies two-byte numbers, not {_name(spec.dtype)}"
        if spec.kv_cache_dtype != spec.dtype:
            return f"triton_ws has caches of the compute dtype {_name(spec.dtype)}, not of {_name(spec.kv_cache_dtype)}"
        if spec.head_dim > NARROW or spec.head_dim * spec.dtype.itemsize % ALIGNMENT:
            return f"head_dim={spec.head_dim}, and triton_ws takes multiples of 8 up to {NARROW}"
        if spec.block_size % row.tile:
            return f"block_size={spec.block_size}, and triton_ws needs a multiple of {row.tile}"
        if _group_pad(spec) > row.block_m:
            return f"{spec.num_heads // spec.num_kv_heads} heads a group, and triton_ws goes up to {row.block_m}"
        return super().unsupported_reason(spec, info)

    def _planner(self, row: AttentionRow, limits: Limits) -> Planner:
        planner = super()._planner(row, limits)
        return replace(planner, block_q=row.block_m // _group_pad(self.spec)) if row is self._rows[-1] else planner

    def _do_items(
        self,
        grid: tuple[int],
        out: torch.Tensor,
        q: torch.Tensor,
        kv_cache: KVCache,
        metadata: TritonMetadata,
        sinks: torch.Tensor,
        factors: tuple[float, float, float],
        constants: Mapping[str, int],
    ) -> None:
        if metadata.row is not self._rows[-1]:
            super()._do_items(grid, out, q, kv_cache, metadata, sinks, factors, constants)
            return
        q = _aligned(q)
        tile = [constants["TILE"], constants["HEAD_PAD"]]
        # Descriptors that a program makes lie in memory that Triton asks for at the launch.
        triton.set_allocator(functools.partial(_scratch, q.device))
        attention_ws_kernel[grid](
            out,
            metadata.partials,
            metadata.lses,
            q,
            *(TensorDescriptor.from_tensor(cache.view(-1, self.spec.head_dim), tile) for cache in kv_cache),
            metadata.block_table,
            metadata.work,
            sinks,
            *factors,
            len(q),
            q.stride(0),
            metadata.block_table.stride(0),
            **constants,
            GROUP_PAD=_group_pad(self.spec),
            **metadata.row.options,
        )


def _group_pad(spec: AttentionSpec) -> int:
    """Rows that a query takes: its heads of a group, in a power of two."""
    return 1 << (spec.num_heads // spec.num_kv_heads - 1).bit_length()


def _aligned(q: torch.Tensor) -> torch.Tensor:
    """q, or a copy of it if a descriptor could not describe it."""
    step = q.stride(0) * q.dtype.itemsize
    return (
        q if q.data_ptr() % ALIGNMENT == 0 and step % ALIGNMENT == 0 else q.clone(memory_format=torch.contiguous_format)
    )


def _scratch(device: torch.device, size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Bytes for one launch. torch aligns to more than Triton asks for, and orders reuse by stream."""
    return torch.empty(size, dtype=torch.int8, device=device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
