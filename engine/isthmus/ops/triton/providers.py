"""The Triton kernels as provider "triton" of the ops, on any architecture."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isthmus.ops.registry import KernelRegistry
from isthmus.ops.sampling import log_of
from isthmus.ops.triton.arch import Arch
from isthmus.ops.triton.attention import triton_attention
from isthmus.ops.triton.attention_ws import triton_ws_attention
from isthmus.ops.triton.kernels.activation import gated_kernel
from isthmus.ops.triton.kernels.norm import rms_norm_kernel
from isthmus.ops.triton.kernels.rope import rope_kernel
from isthmus.ops.triton.kernels.sample import sample_kernel

PROVIDER = "triton"
TILE_ELEMENTS = 2048
"""Of one program, where rows are shorter: enough bytes in flight, few enough registers. Static: not measured yet."""
ELEMENTS_PER_LANE = 8
"""16 bytes of a half precision, the widest load."""
MAX_LANES = 1024
"""Of one program, on every architecture."""


def register(registry: KernelRegistry, arch: Arch) -> None:
    """Offer everything that runs on `arch`."""
    registry.add_attention(triton_attention(arch))
    registry.add_attention(triton_attention(arch, batch_invariant=True))
    specialised = triton_ws_attention(arch)
    if specialised is not None:
        registry.add_attention(specialised)
    ops = TritonOps(arch)
    registry.add_op("rms_norm", PROVIDER, ops.rms_norm)
    registry.add_op("fused_add_rms_norm", PROVIDER, ops.fused_add_rms_norm)
    registry.add_op("rope", PROVIDER, ops.rope)
    registry.add_op("silu_and_mul", PROVIDER, ops.silu_and_mul)
    registry.add_op("gelu_and_mul", PROVIDER, ops.gelu_and_mul)
    registry.add_op("sample", PROVIDER, ops.sample)


@dataclass(frozen=True, slots=True)
class Tile:
    """rows x columns of one program; both powers of two. A row's result does not depend on how many rows there are."""

    rows: int
    columns: int
    num_warps: int

    @classmethod
    def of_row_blocks(cls, width: int, arch: Arch) -> Tile:
        """Blocks of a row, or several rows that are shorter than a block."""
        return cls._make(min(power_of_two(width), TILE_ELEMENTS), arch)

    @classmethod
    def of_whole_rows(cls, width: int, arch: Arch) -> Tile:
        """Rows in one piece, for sums along them."""
        return cls._make(power_of_two(width), arch)

    @classmethod
    def _make(cls, columns: int, arch: Arch) -> Tile:
        rows = max(TILE_ELEMENTS // columns, 1)
        lanes = min(rows * columns // ELEMENTS_PER_LANE, MAX_LANES)
        return cls(rows, columns, max(lanes // arch.wave_size, 1))


@dataclass(frozen=True, slots=True)
class TritonOps:
    """The ops on one architecture. Arguments, results and roundings are those of the native functions."""

    arch: Arch

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `isthmus.ops.norm.rms_norm`."""
        out, _ = self._rms_norm(x, None, weight, eps)
        return out

    def fused_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `isthmus.ops.norm.fused_add_rms_norm`."""
        return self._rms_norm(x, residual, weight, eps)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See `isthmus.ops.activation.silu_and_mul`."""
        return self._gated(x, gelu=False)

    def gelu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """See `isthmus.ops.activation.gelu_and_mul`."""
        return self._gated(x, gelu=True)

    def rope(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `isthmus.ops.rotary.rope`. Products are not rounded before they are added."""
        q, k = dense_rows(q), dense_rows(k)
        num_tokens, heads, head_dim = q.shape
        kv_heads, half = k.shape[1], cos_sin.shape[1] // 2
        q_out, k_out = torch.empty_like(q, memory_format=CONTIGUOUS), torch.empty_like(k, memory_format=CONTIGUOUS)
        if num_tokens == 0:
            return q_out, k_out
        tile = Tile.of_whole_rows(half, self.arch)
        query_programs = ceil_div(num_tokens * heads, tile.rows)
        rest = head_dim - 2 * half
        rope_kernel[(query_programs + ceil_div(num_tokens * kv_heads, tile.rows),)](
            q_out,
            k_out,
            q,
            k,
            positions,
            cos_sin,
            num_tokens,
            query_programs,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            HALF=half,
            HALF_PAD=tile.columns,
            REST_PAD=power_of_two(rest) if rest else 0,
            ROWS=tile.rows,
            num_warps=tile.num_warps,
        )
        return q_out, k_out

    def sample(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor | None,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        min_p: torch.Tensor | None,
        seeds: torch.Tensor,
    ) -> torch.Tensor:
        """See `isthmus.ops.sampling.sample`. Tokens are the same, and the host waits for nothing."""
        if temperature is None:
            return logits.argmax(dim=-1)
        logits = dense_rows(logits)
        num_rows, width = logits.shape
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        if num_rows > 0:
            tile = Tile.of_row_blocks(width, self.arch)
            sample_kernel[(ceil_div(num_rows, tile.rows),)](
                out,
                logits,
                temperature,
                out if top_k is None else top_k,
                temperature if top_p is None else top_p,
                temperature if min_p is None else log_of(min_p),
                seeds,
                num_rows,
                logits.stride(0),
                WIDTH=width,
                BLOCK=tile.columns,
                ROWS=tile.rows,
                TOP_K=top_k is not None,
                TOP_P=top_p is not None,
                MIN_P=min_p is not None,
                num_warps=tile.num_warps,
                enable_fp_fusion=False,
            )
        return out

    def _rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm, and what was normalised."""
        x = dense_rows(x)
        other = x if residual is None else dense_rows(residual)
        num_rows, width = x.shape
        out = torch.empty_like(x, memory_format=CONTIGUOUS)
        total = x if residual is None else torch.empty_like(x, memory_format=CONTIGUOUS)
        if num_rows > 0:
            tile = Tile.of_whole_rows(width, self.arch)
            rms_norm_kernel[(ceil_div(num_rows, tile.rows),)](
                out,
                total,
                x,
                other,
                weight,
                num_rows,
                x.stride(0),
                other.stride(0),
                eps,
                WIDTH=width,
                BLOCK=tile.columns,
                ROWS=tile.rows,
                ADD=residual is not None,
                num_warps=tile.num_warps,
            )
        return out, total

    def _gated(self, x: torch.Tensor, *, gelu: bool) -> torch.Tensor:
        x = dense_rows(x)
        num_rows, width = x.shape[0], x.shape[1] // 2
        out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
        if num_rows > 0:
            tile = Tile.of_row_blocks(width, self.arch)
            gated_kernel[(ceil_div(num_rows, tile.rows), ceil_div(width, tile.columns))](
                out,
                x,
                num_rows,
                x.stride(0),
                WIDTH=width,
                BLOCK=tile.columns,
                ROWS=tile.rows,
                GELU=gelu,
                num_warps=tile.num_warps,
            )
        return out


CONTIGUOUS = torch.contiguous_format


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it if the last dimension is strided."""
    return x if x.stride(-1) == 1 else x.contiguous()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(size: int) -> int:
    """The smallest that is not below `size`."""
    return 1 << max(size - 1, 0).bit_length()
