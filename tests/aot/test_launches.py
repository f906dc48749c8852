"""The host's side of every kernel, on a CPU: what it launches is what the kernel was written for, and a wrong argument
is found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from aot.launch_contract import (
    DIVISIBLE,
    RANGE,
    AttentionStep,
    attention_faults,
    constant_faults,
    grid_fault,
    hint_faults,
    number_faults,
    tensor_faults,
    type_faults,
)
from isthmus.ops.triton import attention, providers
from isthmus.ops.triton.aot.attention_workloads import LARGE_NUM_BLOCKS, made_up_batch
from isthmus.ops.triton.aot.record import Launch, recording
from isthmus.ops.triton.arch import ARCHS
from isthmus.ops.triton.attention import triton_attention
from isthmus.ops.triton.providers import TritonOps
from isthmus.platforms.attention import AttentionSpec

HOST, META = torch.device("cpu"), torch.device("meta")
BF16, FP32 = torch.bfloat16, torch.float32
NVIDIA, AMD = "sm_90", "gfx942"
SPEC = AttentionSpec(8, 2, 64, 16, BF16, BF16, scale=0.125)
LENS = (1, 37, 5, 0, 200)
Change = Callable[[tuple[int, ...], list[Any]], tuple[int, ...]]


def attend(arch: str = NVIDIA, spec: AttentionSpec = SPEC, *, num_blocks: int = 8, shift: int = 0) -> list[str]:
    """The faults of one layer's launches. shift: elements that q starts behind an aligned address."""
    facts = replace(ARCHS[arch], multiprocessors=3)
    backend = triton_attention(facts)(spec, HOST)
    cache = tuple(
        torch.empty(tensor.shape, dtype=tensor.dtype, device=META)
        for tensor in backend.kv_cache_layout(num_blocks).tensors
    )
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    num_tokens, width = sum(LENS), (heads + 2 * kv_heads) * dim
    flat = torch.empty(num_tokens * width + shift, dtype=spec.dtype)
    qkv = flat[shift:].view(num_tokens, heads + 2 * kv_heads, dim)
    q, v = qkv[:, :heads], qkv[:, heads + kv_heads :]
    k = torch.empty((num_tokens, kv_heads, dim), dtype=spec.dtype)
    metadata = backend.build_metadata(made_up_batch(spec.block_size, LENS))
    with recording(facts) as launches:
        out = backend.forward(q, k, v, cache, metadata)
    return attention_faults(launches, AttentionStep(facts, spec, q, k, v, cache, metadata, out))


@pytest.mark.parametrize("arch", list(ARCHS))
def test_attention_on_every_architecture(arch: str) -> None:
    assert attend(arch) == []


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, head_dim=80),
        replace(SPEC, num_heads=14),
        replace(SPEC, sliding_window=100),
        replace(SPEC, soft_cap=30.0),
        replace(SPEC, dtype=FP32, kv_cache_dtype=FP32),
        replace(SPEC, kv_cache_dtype=torch.float8_e5m2),
        replace(SPEC, block_size=64),
    ],
    ids=["d80", "g7", "window", "soft-cap", "fp32", "fp8", "block-64"],
)
def test_attention_of_every_feature(spec: AttentionSpec) -> None:
    assert attend(spec=spec) == []


@pytest.mark.parametrize(("num_blocks", "is_narrow"), [(8, True), (LARGE_NUM_BLOCKS, False)])
def test_the_compiler_knows_whether_a_cache_is_below_2_gib(num_blocks: int, is_narrow: bool) -> None:
    facts = ARCHS[AMD]
    backend = triton_attention(facts)(replace(SPEC, head_dim=128, num_kv_heads=8), HOST)
    cache = [torch.empty(t.shape, dtype=t.dtype, device=META) for t in backend.kv_cache_layout(num_blocks).tensors]
    q = torch.empty((1, 8, 128), dtype=BF16)
    with recording(facts) as launches:
        backend.forward(q, q, q, tuple(cache), backend.build_metadata(made_up_batch(16, (1,))))
    missing = list(hint_faults(launches[1], RANGE, ("key_cache", "value_cache")))
    assert missing == (
        [] if is_narrow else [f"attention_kernel: {name}_cache lacks {RANGE}" for name in ("key", "value")]
    )


def swap(first: int, second: int) -> Change:
    """Two arguments in each other's places."""

    def change(grid: tuple[int, ...], arguments: list[Any]) -> tuple[int, ...]:
        arguments[first], arguments[second] = arguments[second], arguments[first]
        return grid

    return change


def with_argument(index: int, make: Callable[[Any], Any]) -> Change:
    """Another argument."""

    def change(grid: tuple[int, ...], arguments: list[Any]) -> tuple[int, ...]:
        arguments[index] = make(arguments[index])
        return grid

    return change


class Tampered:
    """A kernel that is launched otherwise than the host's code says."""

    def __init__(self, kernel: Any, change: Change) -> None:
        self._kernel, self._change = kernel, change

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            changed = list(arguments)
            self._kernel[self._change(grid, changed)](*changed, **constants)

        return launch


@pytest.mark.parametrize(
    ("kernel", "change", "fault"),
    [
        ("cache_kernel", swap(8, 9), "cache_kernel: k_stride is 768, not 128"),
        ("cache_kernel", swap(0, 1), "cache_kernel: key_cache is another tensor"),
        ("cache_kernel", lambda grid, _: grid[::-1], "cache_kernel: grid (2, 16, 1), not (16, 2, 1)"),
        ("cache_kernel", lambda grid, _: (grid[0] - 1, grid[1]), "cache_kernel: grid (15, 2, 1), not (16, 2, 1)"),
        ("cache_kernel", with_argument(4, lambda x: x.int()), "cache_kernel: slot_mapping is *i32, not *i64"),
        ("attention_kernel", swap(12, 13), "attention_kernel: q_stride is 512, not 768"),
        ("attention_kernel", swap(4, 5), "attention_kernel: key_cache is another tensor"),
        ("attention_kernel", with_argument(7, lambda x: x.long()), "attention_kernel: work is *i64, not *i32"),
        ("attention_kernel", with_argument(6, lambda x: x.long()), "attention_kernel: block_table is *i64, not *i32"),
        ("attention_kernel", with_argument(13, lambda x: x * 2**32), "attention_kernel: table_stride is i64"),
        ("attention_kernel", with_argument(9, lambda x: x / 1.4426950408889634), "qk_scale is 0.125, not"),
        ("attention_kernel", lambda grid, _: (grid[0] // 2,), "attention_kernel: grid (1, 1, 1), not (2, 1, 1)"),
        ("merge_kernel", lambda grid, _: (grid[0] + 1,), "merge_kernel: grid (3, 1, 1), not (2, 1, 1)"),
        ("merge_kernel", swap(1, 2), "merge_kernel: partials is another tensor"),
    ],
)
def test_a_planted_wrong_argument_is_found(
    monkeypatch: pytest.MonkeyPatch, kernel: str, change: Change, fault: str
) -> None:
    monkeypatch.setattr(attention, kernel, Tampered(getattr(attention, kernel), change))
    assert any(fault in found for found in attend())


def test_a_pointer_that_lost_its_alignment_is_found() -> None:
    """With q off by an element, K and V of the same storage are too: no wide loads at all."""
    assert f"attention_kernel: q lacks {DIVISIBLE}" in attend(shift=1)


# -- the ops


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def launched(run: Callable[[TritonOps], object], arch: str = NVIDIA) -> tuple[Launch, Any]:
    """The only launch, and what the op returned."""
    with recording(ARCHS[arch]) as launches:
        result = run(TritonOps(ARCHS[arch]))
    (launch,) = launches
    return launch, result


def norm_faults() -> list[str]:
    x, residual, weight = tensor(33, 96)[:, :64], tensor(33, 64), tensor(64)
    launch, (out, total) = launched(lambda ops: ops.fused_add_rms_norm(x, residual, weight, 1e-6))
    rows = launch.variant.constants()["ROWS"]
    return [
        *grid_fault(launch, (-(-33 // rows), 1, 1)),
        *tensor_faults(launch, out_ptr=out, sum_ptr=total, x_ptr=x, residual_ptr=residual, weight_ptr=weight),
        *type_faults(launch, out_ptr=BF16, sum_ptr=BF16, x_ptr=BF16, residual_ptr=BF16, weight_ptr=BF16),
        *number_faults(launch, num_rows=33, x_stride=96, residual_stride=64, eps=1e-6),
        *constant_faults(launch, WIDTH=64, ADD=True),
        *hint_faults(launch, DIVISIBLE, ("x_ptr", "residual_ptr", "out_ptr", "x_stride", "residual_stride")),
    ]


def rope_faults() -> list[str]:
    qkv = tensor(33, 8, 64)
    q, k, _ = qkv.split((4, 2, 2), dim=1)
    positions, table = torch.zeros(33, dtype=torch.int64), tensor(128, 64, dtype=FP32)
    launch, (q_out, k_out) = launched(lambda ops: ops.rope(positions, q, k, table))
    rows = launch.variant.constants()["ROWS"]
    queries = -(-33 * 4 // rows)
    return [
        *grid_fault(launch, (queries + -(-33 * 2 // rows), 1, 1)),
        *tensor_faults(launch, q_out_ptr=q_out, k_out_ptr=k_out, q_ptr=q, k_ptr=k, positions_ptr=positions),
        *type_faults(launch, q_ptr=BF16, k_ptr=BF16, positions_ptr=torch.int64, cos_sin_ptr=FP32),
        *number_faults(launch, num_tokens=33, num_query_programs=queries),
        *number_faults(launch, q_token_stride=512, q_head_stride=64, k_token_stride=512, k_head_stride=64),
        *constant_faults(launch, HEADS=4, KV_HEADS=2, HEAD_DIM=64, HALF=32, REST_PAD=0),
        *hint_faults(launch, DIVISIBLE, ("q_ptr", "k_ptr", "q_token_stride", "k_token_stride", "k_head_stride")),
    ]


def gated_faults() -> list[str]:
    x = tensor(33, 2 * 3000)
    launch, out = launched(lambda ops: ops.silu_and_mul(x))
    constants = launch.variant.constants()
    return [
        *grid_fault(launch, (-(-33 // constants["ROWS"]), -(-3000 // constants["BLOCK"]), 1)),
        *tensor_faults(launch, out_ptr=out, x_ptr=x),
        *type_faults(launch, out_ptr=BF16, x_ptr=BF16),
        *number_faults(launch, num_rows=33, x_stride=6000),
        *constant_faults(launch, WIDTH=3000, GELU=False),
        *hint_faults(launch, DIVISIBLE, ("x_ptr", "out_ptr", "x_stride")),
    ]


def sample_faults() -> list[str]:
    logits, of_rows = tensor(5, 3000, dtype=FP32), tensor(5, dtype=FP32)
    ids, top_k = torch.zeros(5, dtype=torch.int64), torch.ones(5, dtype=torch.int64)
    launch, out = launched(lambda ops: ops.sample(logits, of_rows, top_k, None, None, ids))
    rows = launch.variant.constants()["ROWS"]
    fusion = launch.variant.options()["enable_fp_fusion"]
    return [
        *grid_fault(launch, (-(-5 // rows), 1, 1)),
        *tensor_faults(launch, out_ptr=out, logits_ptr=logits, temperature_ptr=of_rows, top_k_ptr=top_k, seeds_ptr=ids),
        *type_faults(launch, out_ptr=torch.int64, logits_ptr=FP32, top_k_ptr=torch.int64, seeds_ptr=torch.int64),
        *number_faults(launch, num_rows=5, stride=3000),
        *constant_faults(launch, WIDTH=3000, TOP_K=True, TOP_P=False, MIN_P=False),
        *(["sample_kernel: products are fused, which makes other tokens"] if fusion else []),
    ]


@pytest.mark.parametrize("faults", [norm_faults, rope_faults, gated_faults, sample_faults])
def test_ops(faults: Callable[[], list[str]]) -> None:
    assert faults() == []


@pytest.mark.parametrize(
    ("faults", "kernel", "change", "fault"),
    [
        (norm_faults, "rms_norm_kernel", swap(6, 7), "x_stride is 64, not 96"),
        (norm_faults, "rms_norm_kernel", swap(0, 1), "out_ptr is another tensor"),
        (norm_faults, "rms_norm_kernel", with_argument(4, lambda x: x.float()), "weight_ptr is *fp32, not *bf16"),
        (rope_faults, "rope_kernel", swap(8, 9), "q_token_stride is 64, not 512"),
        (rope_faults, "rope_kernel", with_argument(4, lambda x: x.int()), "positions_ptr is *i32, not *i64"),
        (rope_faults, "rope_kernel", lambda grid, _: (grid[0] - 1,), "rope_kernel: grid"),
        (sample_faults, "sample_kernel", swap(3, 6), "top_k_ptr is another tensor"),
        (sample_faults, "sample_kernel", with_argument(3, lambda x: x.int()), "top_k_ptr is *i32, not *i64"),
        (gated_faults, "gated_kernel", lambda grid, _: grid[::-1], "gated_kernel: grid (2, 33, 1), not (33, 2, 1)"),
        (gated_faults, "gated_kernel", with_argument(3, lambda x: x // 2), "x_stride is 3000, not 6000"),
    ],
)
def test_a_planted_wrong_argument_of_an_op_is_found(
    monkeypatch: pytest.MonkeyPatch, faults: Callable[[], list[str]], kernel: str, change: Change, fault: str
) -> None:
    monkeypatch.setattr(providers, kernel, Tampered(getattr(providers, kernel), change))
    assert any(fault in found for found in faults())
