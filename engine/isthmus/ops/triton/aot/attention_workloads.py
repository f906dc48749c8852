"""One layer's attention, in each kind of step, with every feature that is served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import numpy as np
import torch

from isthmus.ops.triton.aot.expected import matrix_instructions
from isthmus.ops.triton.aot.workload import (
    BF16,
    FP16,
    FP32,
    HOST,
    MAX_MODEL_LEN,
    META,
    NUM_REQS,
    NUM_TOKENS,
    Workload,
    registry_of,
)
from isthmus.ops.triton.arch import Arch
from isthmus.ops.triton.attention import TritonAttentionBackend
from isthmus.ops.triton.providers import PROVIDER
from isthmus.ops.triton.tuning import DECODE, PREFILL
from isthmus.platforms.attention import AttentionBatch, AttentionSpec
from isthmus.platforms.facts import DeviceInfo

NARROW_FLOATS: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float8_e4m3fn: "e4m3fn", torch.float8_e4m3fnuz: "e4m3fnuz", torch.float8_e5m2: "e5m2"}
)
NUM_BLOCKS = 64
LARGE_NUM_BLOCKS = 2**18
"""With them, each storage of a cache is beyond 2 GiB, at every shape here."""
LARGE_BLOCK, SMALL_BLOCK = 64, 16
LARGE_BLOCK_FAMILIES = frozenset({"sm9x", "sm10x", "sm12x", "gfx9"})
"""Where the platforms' `cache.block_size` is LARGE_BLOCK by default."""
DESCRIBED_RANGE = frozenset({"gfx9", "gfx11", "gfx12"})
"""Families whose code depends on whether a storage is beyond 2 GiB."""


@dataclass(frozen=True, slots=True)
class _Attention:
    """A spec besides what is common. num_blocks: of the cache."""

    name: str
    spec: AttentionSpec
    num_blocks: int = NUM_BLOCKS


def attention_workloads(arch: Arch) -> Iterator[Workload]:
    """Every backend's, with every case that it takes."""
    for backend in registry_of(arch).attention_backends().values():
        if not issubclass(backend, TritonAttentionBackend):
            continue
        prefix = "attention" if backend.name == PROVIDER else f"attention of {backend.name}"
        for case in _attention_cases(arch):
            if backend.unsupported_reason(case.spec, DeviceInfo(arch.name, arch.name, 0, ())) is not None:
                continue
            for kind, query_lens in ((DECODE, (1,) * NUM_REQS), (PREFILL, (NUM_TOKENS,))):
                run = partial(run_attention, backend, spec=case.spec, query_lens=query_lens, num_blocks=case.num_blocks)
                # What has one kernel for all steps has the one of a prefill.
                has_own_kernel = kind == PREFILL or len(backend.kinds) > 1
                matrix = matrix_instructions(arch, kind, case.spec.dtype.itemsize) if has_own_kernel else frozenset()
                yield Workload(f"{prefix} {kind} {case.name}", run, matrix)


def _attention_cases(arch: Arch) -> Iterator[_Attention]:
    """Each of the axes alone, around the shape of most models: group 4, head_dim 128, bf16."""
    block = default_block_size(arch)
    base = AttentionSpec(32, 8, 128, block, BF16, BF16, scale=128**-0.5)
    yield _Attention("bf16 d128 g4", base)
    yield _Attention("fp16 d128 g4", replace(base, dtype=FP16, kv_cache_dtype=FP16))
    yield _Attention("fp32 d128 g4", replace(base, dtype=FP32, kv_cache_dtype=FP32))
    for name in arch.fp8_kv:
        dtype: torch.dtype = getattr(torch, name)
        yield _Attention(f"bf16 d128 g4 {NARROW_FLOATS[dtype]} cache", replace(base, kv_cache_dtype=dtype))
    for head_dim in (64, 80, 96, 256):
        yield _Attention(f"bf16 d{head_dim} g4", replace(base, head_dim=head_dim))
    yield _Attention("bf16 d128 g1", replace(base, num_kv_heads=32))
    yield _Attention("bf16 d128 g7", replace(base, num_heads=28, num_kv_heads=4))
    yield _Attention("bf16 d128 g4 window", replace(base, sliding_window=4096))
    yield _Attention("bf16 d128 g4 soft cap", replace(base, soft_cap=50.0))
    yield _Attention(
        "bf16 d256 g2 window", replace(base, num_heads=8, num_kv_heads=4, head_dim=256, sliding_window=1024)
    )
    other = SMALL_BLOCK if block == LARGE_BLOCK else LARGE_BLOCK
    yield _Attention(f"bf16 d128 g4 block {other}", replace(base, block_size=other))
    if arch.family in DESCRIBED_RANGE:
        yield _Attention("bf16 d128 g4 large cache", base, LARGE_NUM_BLOCKS)


def default_block_size(arch: Arch) -> int:
    """Of `cache.block_size`, on the platforms that have such devices."""
    return LARGE_BLOCK if arch.family in LARGE_BLOCK_FAMILIES else SMALL_BLOCK


def run_attention(
    backend_class: type[TritonAttentionBackend],
    *,
    spec: AttentionSpec,
    query_lens: tuple[int, ...],
    num_blocks: int,
    max_model_len: int = MAX_MODEL_LEN,
) -> None:
    """One layer's attention of a step. k and q come out of a rotation, v is a view of the fused projection."""
    backend = backend_class(spec, HOST)
    tensors = backend.kv_cache_layout(num_blocks).tensors
    cache = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device=META) for tensor in tensors)
    num_tokens, heads, kv_heads = sum(query_lens), spec.num_heads, spec.num_kv_heads
    qkv = torch.empty((num_tokens, (heads + 2 * kv_heads) * spec.head_dim), dtype=spec.dtype, device=META)
    v = qkv[:, -kv_heads * spec.head_dim :].view(num_tokens, kv_heads, spec.head_dim)
    q = torch.empty((num_tokens, heads, spec.head_dim), dtype=spec.dtype, device=META)
    k = torch.empty((num_tokens, kv_heads, spec.head_dim), dtype=spec.dtype, device=META)
    backend.forward(q, k, v, cache, backend.build_metadata(made_up_batch(spec.block_size, query_lens, max_model_len)))


def made_up_batch(block_size: int, query_lens: tuple[int, ...], max_model_len: int = MAX_MODEL_LEN) -> AttentionBatch:
    """A step of sequences that start with it, its tensors views of the fronts of larger ones, as a worker's are."""
    count, num_tokens, longest = len(query_lens), sum(query_lens), max(query_lens)
    max_blocks = -(-max(max_model_len, longest) // block_size)
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    lens = np.array(query_lens, np.int32)
    table = torch.zeros((2 * count, max_blocks), dtype=torch.int32)
    return AttentionBatch(
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.zeros(2 * count, dtype=torch.int32)[:count].copy_(torch.from_numpy(lens)),
        block_table=table[:count, : -(-longest // block_size)],
        slot_mapping=torch.arange(2 * num_tokens)[:num_tokens],
        num_reqs=count,
        num_tokens=num_tokens,
        max_query_len=longest,
        max_seq_len=longest,
        query_start_loc_np=starts,
        seq_lens_np=lens,
    )
