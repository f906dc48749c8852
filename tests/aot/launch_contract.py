"""What a launch must be: the grid covers the work once, each argument is the tensor, stride or number that it should
be, of the type that the kernel was written for, and the compiler may rely on its alignment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from isthmus.ops.triton.aot.record import Launch
from isthmus.ops.triton.arch import Arch
from isthmus.ops.triton.attention import CACHE_BLOCK_T, TritonMetadata
from isthmus.platforms.attention import AttentionSpec, KVCache

DIVISIBLE, RANGE = "tt.divisibility", "tt.pointer_range"
FP32 = torch.float32
POINTERS: Mapping[torch.dtype, str] = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class AttentionStep:
    """What the host's code was given, from which all its launches follow."""

    arch: Arch
    spec: AttentionSpec
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: KVCache
    metadata: TritonMetadata
    out: torch.Tensor


def attention_faults(launches: Sequence[Launch], step: AttentionStep) -> list[str]:
    """All that is wrong with the launches of one layer's attention."""
    names = [launch.variant.name for launch in launches]
    if names != ["cache_kernel", "attention_kernel", "merge_kernel"]:
        return [f"launches {names}"]
    write, attend, merge = launches
    return [*_write_faults(write, step), *_attend_faults(attend, step), *_merge_faults(merge, attend, step)]


def _write_faults(launch: Launch, step: AttentionStep) -> Iterator[str]:
    spec, cache = step.spec, step.cache
    tokens = len(step.k)
    yield from grid_fault(launch, (math.ceil(tokens / CACHE_BLOCK_T), spec.num_kv_heads, 1))
    yield from tensor_faults(
        launch, key_cache=cache[0], value_cache=cache[1], k=step.k, v=step.v, slot_mapping=step.metadata.slot_mapping
    )
    yield from type_faults(
        launch,
        key_cache=spec.kv_cache_dtype,
        value_cache=spec.kv_cache_dtype,
        k=spec.dtype,
        v=spec.dtype,
        slot_mapping=torch.int64,
    )
    yield from number_faults(launch, num_tokens=tokens, k_stride=step.k.stride(0), v_stride=step.v.stride(0))
    yield from constant_faults(
        launch, NUM_KV_HEADS=spec.num_kv_heads, HEAD_DIM=spec.head_dim, BLOCK_SIZE=spec.block_size
    )
    yield from hint_faults(launch, DIVISIBLE, ("key_cache", "value_cache", "k", "v", "k_stride", "v_stride"))


def _attend_faults(launch: Launch, step: AttentionStep) -> Iterator[str]:
    spec, metadata = step.spec, step.metadata
    groups = max(step.arch.multiprocessors * metadata.row.programs // spec.num_kv_heads, 1)
    yield from grid_fault(launch, (groups * spec.num_kv_heads, 1, 1))
    yield from tensor_faults(
        launch,
        out=step.out,
        q=step.q,
        key_cache=step.cache[0],
        value_cache=step.cache[1],
        block_table=metadata.block_table,
        work=metadata.work,
        partials=metadata.partials,
        lses=metadata.lses,
    )
    yield from type_faults(
        launch,
        out=spec.dtype,
        q=spec.dtype,
        key_cache=spec.kv_cache_dtype,
        value_cache=spec.kv_cache_dtype,
        block_table=torch.int32,
        work=torch.int32,
        partials=FP32,
        lses=FP32,
    )
    yield from number_faults(
        launch,
        q_stride=step.q.stride(0),
        table_stride=metadata.block_table.stride(0),
        qk_scale=spec.scale * (math.log2(math.e) if spec.soft_cap is None else 1.0),
        soft_cap=spec.soft_cap or 0.0,
        v_scale=1.0,
    )
    yield from constant_faults(
        launch,
        NUM_KV_HEADS=spec.num_kv_heads,
        GROUP=spec.num_heads // spec.num_kv_heads,
        HEAD_DIM=spec.head_dim,
        BLOCK_SIZE=spec.block_size,
        WINDOW=spec.sliding_window or 0,
        SOFT_CAP=spec.soft_cap is not None,
    )
    yield from hint_faults(launch, DIVISIBLE, ("out", "q", "key_cache", "value_cache", "partials", "lses", "q_stride"))
    if not (launch.arguments["out"].is_contiguous() and launch.arguments["block_table"].stride(1) == 1):
        yield "attention_kernel: out, or a row of the block table, is strided"


def _merge_faults(launch: Launch, attend: Launch, step: AttentionStep) -> Iterator[str]:
    yield from grid_fault(launch, attend.grid)
    shared = ("out", "partials", "lses", "work")
    yield from tensor_faults(launch, **{name: attend.arguments[name] for name in shared})
    constants = attend.variant.constants()
    names = ("NUM_KV_HEADS", "GROUP", "HEAD_DIM", "HEAD_PAD", "BLOCK_M")
    yield from constant_faults(launch, **{name: constants[name] for name in names})


def grid_fault(launch: Launch, expected: tuple[int, int, int]) -> Iterator[str]:
    if launch.grid != expected:
        yield f"{launch.variant.name}: grid {launch.grid}, not {expected}"


def tensor_faults(launch: Launch, **expected: torch.Tensor) -> Iterator[str]:
    """Wherever the tensor is another, in another shape or with other strides."""
    for name, tensor in expected.items():
        passed = launch.arguments[name]
        if passed is not tensor and (
            passed.untyped_storage()._cdata != tensor.untyped_storage()._cdata
            or (passed.shape, passed.stride(), passed.storage_offset())
            != (tensor.shape, tensor.stride(), tensor.storage_offset())
        ):
            yield f"{launch.variant.name}: {name} is another tensor"


def type_faults(launch: Launch, **expected: torch.dtype) -> Iterator[str]:
    """Pointers to other types. All numbers are int32 or float32."""
    signature = launch.variant.signature()
    for name, dtype in expected.items():
        if signature[name] != POINTERS[dtype]:
            yield f"{launch.variant.name}: {name} is {signature[name]}, not {POINTERS[dtype]}"
    for name, given in signature.items():
        if not given.startswith("*") and given not in ("i32", "fp32", "constexpr"):
            yield f"{launch.variant.name}: {name} is {given}"


def number_faults(launch: Launch, **expected: float) -> Iterator[str]:
    for name, number in expected.items():
        passed = launch.arguments[name]
        if not math.isclose(passed, number, rel_tol=1e-12):
            yield f"{launch.variant.name}: {name} is {passed}, not {number}"


def constant_faults(launch: Launch, **expected: object) -> Iterator[str]:
    constants = launch.variant.constants()
    for name, value in expected.items():
        if constants[name] != value:
            yield f"{launch.variant.name}: {name} is compiled as {constants[name]}, not {value}"


def hint_faults(launch: Launch, hint: str, names: Sequence[str]) -> Iterator[str]:
    hints = launch.variant.hints()
    for name in names:
        if hint not in hints.get(name, ()):
            yield f"{launch.variant.name}: {name} lacks {hint}"
