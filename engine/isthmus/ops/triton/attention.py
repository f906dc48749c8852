"""Paged attention in Triton, the host's side. Three launches a layer: cache write, attention, merge of split items."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from isthmus.ops.triton.arch import Arch
from isthmus.ops.triton.kernels.attention import attention_kernel
from isthmus.ops.triton.kernels.cache import cache_kernel
from isthmus.ops.triton.kernels.merge import merge_kernel
from isthmus.ops.triton.plan import RECORD, Limits, Planner
from isthmus.ops.triton.tuning import DECODE, MIN_DOT, PREFILL, AttentionRow, attention_row
from isthmus.platforms.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    CacheTensor,
    GraphSupport,
    KVCache,
    KVCacheLayout,
)
from isthmus.platforms.facts import DeviceInfo

LOG2_E = math.log2(math.e)
HOST = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256
CACHE_BLOCK_T = 16
"""Tokens that a program of the cache write takes."""
MERGE_BLOCK_S = 16
"""Partial results that a step of the merge takes."""
INVARIANT_SPLIT = 4096
"""Keys of a piece where results must not depend on the batch; more if partial results took over `INVARIANT_BYTES`."""
INVARIANT_BYTES = 512 * 2**20


def triton_attention(arch: Arch, *, batch_invariant: bool = False) -> type[TritonAttentionBackend]:
    """The backend to register for a device of `arch`, whose `multiprocessors` should be the device's own.

    batch_invariant: under the name "triton_invariant", see there.
    """
    return _Invariant.on(arch) if batch_invariant else TritonAttentionBackend.on(arch)


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    """slot_mapping [T] int64, block_table [R, B] int32: the batch's.  work [records, RECORD] int32: the plan.

    partials [slots * K * block_m * D], lses [slots * K * block_m], float32: scratch, which each layer writes anew.
    """

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    work: torch.Tensor
    partials: torch.Tensor
    lses: torch.Tensor
    row: AttentionRow


class TritonAttentionBackend(AttentionBackend):
    """Cache: K and V apart, each [num_blocks, num_kv_heads, block_size, head_dim]: a block of one head is contiguous.

    On AMD, loads are faster while each of the two is under 2 GiB; they are right above it, too.

    Graphs may hold any step: which kernels run, and on how many programs, depends on the `BatchShape` alone. All else
    is in the work list. Its memory is allocated when the first step comes, for the largest that can.
    """

    name: ClassVar[str] = "triton"
    graph_support: ClassVar[GraphSupport] = GraphSupport.ALWAYS
    arch: ClassVar[Arch]
    kinds: ClassVar[tuple[str, ...]] = (DECODE, PREFILL)
    """The rows of the tuning table that it uses, the last one for any batch, those before for short queries."""
    needs_finite_values: ClassVar[bool] = False
    """Whether the kernel multiplies values that no query sees, by 0: those must not be NaN or infinite."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._rows = tuple(attention_row(self.arch, spec, kind) for kind in self.kinds)
        self._memory: _StepMemory | None = None

    @classmethod
    def on(cls, arch: Arch) -> type[TritonAttentionBackend]:
        """A subclass for devices of `arch`."""
        return type(cls.__name__, (cls,), {"arch": arch, "__doc__": cls.__doc__})

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, info: DeviceInfo) -> str | None:
        if spec.mla_rank is not None:
            return "triton has no MLA"
        if spec.sinks:
            return "triton gets no sinks: `forward` has no argument for them"
        if spec.dtype not in DTYPES:
            return f"triton computes in {_names(DTYPES)}, not in {_names((spec.dtype,))}"
        if spec.head_dim > MAX_HEAD_DIM:
            return f"head_dim={spec.head_dim}, and triton goes up to {MAX_HEAD_DIM}"
        caches = (spec.dtype, *(getattr(torch, name) for name in cls.arch.fp8_kv))
        if spec.kv_cache_dtype not in caches:
            return f"a cache of {_names((spec.kv_cache_dtype,))}; on {cls.arch.name} triton has {_names(caches)}"
        return None

    def kv_cache_layout(self, num_blocks: int) -> KVCacheLayout:
        s = self.spec
        one = CacheTensor((num_blocks, s.num_kv_heads, s.block_size, s.head_dim), s.kv_cache_dtype, block_dim=0)
        return KVCacheLayout((one, one))

    def build_metadata(self, batch: AttentionBatch) -> TritonMetadata:
        memory, row = self._memory_for(batch), self._row_for(batch.max_query_len)
        planner, num_rows = self._planner(row, memory.limits), len(batch.slot_mapping)
        used = planner.plan(batch.query_start_loc_np, batch.seq_lens_np, num_rows, memory.mirror.numpy())
        memory.work[:used].copy_(memory.mirror[:used], non_blocking=True)
        return TritonMetadata(batch.slot_mapping, batch.block_table, memory.work, memory.partials, memory.lses, row)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_cache: KVCache, metadata: TritonMetadata
    ) -> torch.Tensor:
        """Padding rows of the result are 0."""
        self.write(k, v, kv_cache, metadata.slot_mapping)
        return self.attend(q, kv_cache, metadata)

    def copy_blocks(self, kv_cache: KVCache, src: torch.Tensor, dst: torch.Tensor) -> None:
        """By index, not by a kernel: every source is read before any target is written, so a pair's target may be
        another's source. Programs of one launch, each with a pair, have no such order; and copies are rare.
        """
        super().copy_blocks(_bytes_if_narrow(kv_cache), src, dst)

    def swap_blocks(self, src_cache: KVCache, dst_cache: KVCache, src: torch.Tensor, dst: torch.Tensor) -> None:
        super().swap_blocks(_bytes_if_narrow(src_cache), _bytes_if_narrow(dst_cache), src, dst)

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: KVCache,
        slot_mapping: torch.Tensor,
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        """k / k_scale and v / v_scale to the cache, k and v [T, K, D]. An 8-bit cache gets its largest number for
        what is larger, and only that is scaled. Where `needs_finite_values`, a value that is not finite becomes 0.
        """
        s, (key_cache, value_cache) = self.spec, kv_cache
        k, v = _dense_heads(k), _dense_heads(v)
        cache_kernel[(-(-len(k) // CACHE_BLOCK_T), s.num_kv_heads)](
            key_cache,
            value_cache,
            k,
            v,
            slot_mapping,
            1 / k_scale,
            1 / v_scale,
            len(k),
            k.stride(0),
            v.stride(0),
            NUM_KV_HEADS=s.num_kv_heads,
            HEAD_DIM=s.head_dim,
            HEAD_PAD=head_pad(s),
            BLOCK_SIZE=s.block_size,
            BLOCK_T=CACHE_BLOCK_T,
            LARGEST=torch.finfo(s.kv_cache_dtype).max if s.kv_cache_dtype.itemsize == 1 else 0.0,
            FINITE=self.needs_finite_values,
        )

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: KVCache,
        metadata: TritonMetadata,
        *,
        sinks: torch.Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> torch.Tensor:
        """[T, H, D] for q [T, H, D]. sinks [H]: logits that join each head's softmax. Scales: as in `write`."""
        s, row = self.spec, metadata.row
        q = _dense_heads(q)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        grid = (self._num_groups(row) * s.num_kv_heads,)
        shape = {
            "NUM_KV_HEADS": s.num_kv_heads,
            "GROUP": s.num_heads // s.num_kv_heads,
            "HEAD_DIM": s.head_dim,
            "HEAD_PAD": head_pad(s),
            "BLOCK_M": row.block_m,
            "SINKS": sinks is not None,
        }
        constants = {
            **shape,
            "BLOCK_SIZE": s.block_size,
            "TILE": row.tile,
            "WINDOW": s.sliding_window or 0,
            "SOFT_CAP": s.soft_cap is not None,
        }
        sinks = metadata.lses if sinks is None else sinks
        factors = (s.scale * k_scale * (LOG2_E if s.soft_cap is None else 1.0), s.soft_cap or 0.0, v_scale)
        self._do_items(grid, out, q, kv_cache, metadata, sinks, factors, constants)
        merge_kernel[grid](out, metadata.partials, metadata.lses, metadata.work, sinks, **shape, BLOCK_S=MERGE_BLOCK_S)
        return out

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
        """Launch the kernel that does all items of the work list. factors: qk_scale, soft_cap, v_scale."""
        attention_kernel[grid](
            out,
            metadata.partials,
            metadata.lses,
            q,
            *kv_cache,
            metadata.block_table,
            metadata.work,
            sinks,
            *factors,
            q.stride(0),
            metadata.block_table.stride(0),
            **constants,
            **metadata.row.options,
        )

    def _row_for(self, max_query_len: int) -> AttentionRow:
        """The first row whose blocks hold such a query whole, or the last."""
        group = self.spec.num_heads // self.spec.num_kv_heads
        return next((row for row in self._rows if max_query_len * group <= row.block_m), self._rows[-1])

    def _num_groups(self, row: AttentionRow) -> int:
        """Of the plan: so many that one program a kv head fills the device."""
        return max(self.arch.multiprocessors * row.programs // self.spec.num_kv_heads, 1)

    def _planner(self, row: AttentionRow, limits: Limits) -> Planner:
        """What plans the steps of `row` within these limits."""
        s = self.spec
        return Planner(
            block_q=row.block_m * s.num_kv_heads // s.num_heads,
            tile=row.tile,
            num_groups=self._num_groups(row),
            window=s.sliding_window,
        )

    def _slot_floats(self, row: AttentionRow) -> tuple[int, int]:
        """float32 values of one partial result, and of its LSEs."""
        rows = self.spec.num_kv_heads * row.block_m
        return rows * self.spec.head_dim, rows

    def _memory_for(self, batch: AttentionBatch) -> _StepMemory:
        """The static memory, for the largest step that the batch's own static buffers hold."""
        limits = Limits(
            max_tokens=_capacity(batch.slot_mapping),
            max_reqs=_capacity(batch.seq_lens),
            max_keys=batch.block_table.stride(0) * self.spec.block_size,
        )
        if self._memory is None or self._memory.limits != limits:
            self._memory = self._allocate(limits)
        return self._memory

    def _allocate(self, limits: Limits) -> _StepMemory:
        num_records = num_partials = num_lses = 1
        for row in self._rows:
            planner = self._planner(row, limits)
            partial, lse = self._slot_floats(row)
            num_records = max(num_records, planner.max_records(limits))
            num_partials = max(num_partials, planner.max_slots(limits) * partial)
            num_lses = max(num_lses, planner.max_slots(limits) * lse)
        return _StepMemory(limits, num_records, num_partials, num_lses, self.device)


class _Invariant(TritonAttentionBackend):
    """Results of a sequence have the same bits in every batch: one kernel for all steps, and splits at fixed places.

    It costs time where few long sequences leave most of a device without work.
    """

    name: ClassVar[str] = "triton_invariant"
    kinds: ClassVar[tuple[str, ...]] = (PREFILL,)

    def _planner(self, row: AttentionRow, limits: Limits) -> Planner:
        adaptive = super()._planner(row, limits)
        affordable = INVARIANT_BYTES // (4 * sum(self._slot_floats(row)) * adaptive.max_blocks(limits))
        split = max(INVARIANT_SPLIT, -(-limits.max_keys // max(affordable, 1)))
        return replace(adaptive, split=-(-split // row.tile) * row.tile)


class _StepMemory:
    """A work list and scratch at fixed addresses. `mirror` is the host's side of the list: a step is planned only when
    the device has read the one before, as it is with the engine's own inputs.
    """

    def __init__(
        self, limits: Limits, num_records: int, num_partials: int, num_lses: int, device: torch.device
    ) -> None:
        self.limits = limits
        self.mirror = torch.zeros((num_records, RECORD), dtype=torch.int32, pin_memory=device != HOST)
        self.work = self.mirror.to(device)
        self.partials = torch.empty(num_partials, dtype=torch.float32, device=device)
        self.lses = torch.empty(num_lses, dtype=torch.float32, device=device)


def head_pad(spec: AttentionSpec) -> int:
    return max(MIN_DOT, 1 << (spec.head_dim - 1).bit_length())


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] with any distance between tokens, and none between heads."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _bytes_if_narrow(cache: KVCache) -> KVCache:
    """torch does not index tensors of 8-bit floats."""
    return tuple(tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor for tensor in cache)


def _capacity(view: torch.Tensor) -> int:
    """Elements of the whole static buffer that `view` is the front of."""
    return view.untyped_storage().nbytes() // view.dtype.itemsize


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
