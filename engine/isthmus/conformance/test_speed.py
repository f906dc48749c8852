"""Area "speed": how near attention and linear layers come to what the device can do. Informs only: no figure fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.conformance.ceilings import BUDGET_S, Ceilings, best_seconds
from isthmus.conformance.compare import name_of
from isthmus.conformance.selected import attention_spec, selected_attention, selected_linear
from isthmus.conformance.target import Target
from isthmus.platforms import AttentionBackend, AttentionBatch, AttentionSpec, LinearSpec
from isthmus.platforms.attention import KVCache

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
HEADS = f"{NUM_HEADS} heads, {NUM_KV_HEADS} kv heads of {HEAD_DIM}"
HIDDEN_SIZE = 4096
"""One layer of Llama 3 8B."""
NUM_REQS = 16
CONTEXTS = (64, 256, 1024)
PROMPTS = (256, 512, 1024, 2048, 4096)
"""Shortest first: the next, four times as long, is tried while the device is quick enough."""
PATIENCE_S = 1.5
"""For all of one context, its filling included."""
FILL_TOKENS = 2048


@pytest.fixture(autouse=True)
def inference_mode(target: Target) -> Iterator[None]:
    """As the engine runs."""
    with target.platform.inference_mode():
        yield


@pytest.fixture(scope="module")
def ceilings(target: Target) -> Ceilings:
    """In the preferred dtype, as everything here."""
    return Ceilings.measure(target, target.dtypes[0])


@pytest.fixture
def attention(target: Target) -> AttentionSpec:
    reason = target.platform.unclaimed.get("attention")
    if reason is not None:
        pytest.skip(f"not claimed: {reason}")
    return attention_spec(target, target.dtypes[0], num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM)


def three_digits(value: float) -> float:
    return float(f"{value:.3g}")


def uniform_batch(
    num_reqs: int, query_len: int, seq_len: int, block_size: int, device: torch.device, first_block: int = 1
) -> AttentionBatch:
    """Requests of one length, in shuffled blocks from first_block on; a step of the last query_len tokens of each."""
    num_blocks = -(-seq_len // block_size)
    shuffled = torch.randperm(num_reqs * num_blocks, generator=torch.Generator().manual_seed(0))
    table = (first_block + shuffled).view(num_reqs, num_blocks)
    positions = torch.arange(seq_len - query_len, seq_len)
    slots = table[:, positions // block_size] * block_size + positions % block_size
    starts = np.arange(num_reqs + 1, dtype=np.int32) * np.int32(query_len)
    lens = np.full(num_reqs, seq_len, dtype=np.int32)
    return AttentionBatch(
        query_start_loc=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(lens).to(device),
        block_table=table.to(device, torch.int32),
        slot_mapping=slots.flatten().to(device),
        num_reqs=num_reqs,
        num_tokens=num_reqs * query_len,
        max_query_len=query_len,
        max_seq_len=seq_len,
        query_start_loc_np=starts,
        seq_lens_np=lens,
    )


class AttentionBench:
    """The selected backend with room for `num_reqs` requests of `seq_len` tokens in each of several layers."""

    def __init__(self, target: Target, spec: AttentionSpec, num_reqs: int, seq_len: int) -> None:
        self._target, self._spec = target, spec
        self._num_reqs, self._seq_len = num_reqs, seq_len
        self._num_blocks = num_reqs * -(-seq_len // spec.block_size)
        self.backend: AttentionBackend = selected_attention(target, spec)(spec, target.device)
        self._caches = [self._new_cache()]
        self.layer_bytes = 2 * num_reqs * seq_len * spec.num_kv_heads * spec.head_dim * spec.kv_cache_dtype.itemsize
        """Of the keys and values that a decode reads in one layer."""

    def _new_cache(self) -> KVCache:
        layout = self.backend.kv_cache_layout(self._num_blocks + 1)
        zeros, device = self._target.platform.zeros, self._target.device
        return tuple(zeros(tensor.shape, tensor.dtype, device) for tensor in layout.tensors)

    def fill(self, num_bytes: int) -> None:
        """Write every block of as many layers as hold num_bytes: memory that was never written may be no memory."""
        size = self._spec.block_size
        at_once = max(FILL_TOKENS // size, 1)
        inputs = self._inputs(at_once * size)
        for first in range(0, self._num_blocks, at_once):
            num_reqs = min(at_once, self._num_blocks - first)
            batch = uniform_batch(num_reqs, size, size, size, self._target.device, first_block=1 + first)
            q, k, v = (x[: batch.num_tokens] for x in inputs)
            self.backend.forward(q, k, v, self._caches[0], self.backend.build_metadata(batch))
        while len(self._caches) * self.layer_bytes < num_bytes:
            self._caches.append(self._new_cache())
            for tensor, filled in zip(self._caches[-1], self._caches[0], strict=True):
                tensor.copy_(filled)

    def _inputs(self, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """q [T, H, D], k and v [T, K, D] on the device."""
        spec, generator = self._spec, torch.Generator().manual_seed(1)
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        host = (torch.randn(num_tokens, n, spec.head_dim, generator=generator) for n in heads)
        return tuple(x.to(self._target.device, spec.dtype) for x in host)

    def seconds_per_layer(self, query_len: int) -> float:
        """Of a step of the last query_len tokens of every request; metadata apart, which the layers share."""
        batch = uniform_batch(self._num_reqs, query_len, self._seq_len, self._spec.block_size, self._target.device)
        q, k, v = self._inputs(batch.num_tokens)
        metadata = self.backend.build_metadata(batch)

        def step() -> list[torch.Tensor]:
            return [self.backend.forward(q, k, v, cache, metadata) for cache in self._caches]

        assert_finite(step(), self.backend.name)
        return best_seconds(step, self._target.synchronize) / len(self._caches)


class LinearBench:
    """The selected backend for one shape, and as many weights of it as num_bytes hold, one at least."""

    def __init__(self, target: Target, spec: LinearSpec, num_bytes: int) -> None:
        self._target, self._spec = target, spec
        self.backend = selected_linear(target, spec)
        weight = torch.randn(spec.out_features, spec.in_features, generator=torch.Generator().manual_seed(1))
        there = (weight * spec.in_features**-0.5).to(target.device, spec.dtype)
        self.weight_bytes = there.nbytes
        self._packed = [self.backend.pack(there.clone()) for _ in range(max(num_bytes // there.nbytes, 1))]

    def seconds_per_layer(self, rows: int, num_layers: int | None = None) -> float:
        """Of x [rows, in_features] through each of so many weights; None = through all."""
        x = torch.randn(rows, self._spec.in_features, generator=torch.Generator().manual_seed(2))
        there, packed = x.to(self._target.device, self._spec.dtype), self._packed[:num_layers]

        def step() -> list[torch.Tensor]:
            return [self.backend.apply(there, one, None) for one in packed]

        assert_finite(step(), self.backend.name)
        return best_seconds(step, self._target.synchronize) / len(packed)


def assert_finite(results: Sequence[torch.Tensor], name: str) -> None:
    """A figure of a kernel that computes nothing sensible would mislead."""
    for result in results:
        assert bool(result.isfinite().all()), f"{name}: results are not finite"


def test_ceilings(ceilings: Ceilings, record_property: Any) -> None:
    assert ceilings.copy_rate > 0
    assert ceilings.matmul_rate > 0
    record_property("copy ceiling GB/s", three_digits(ceilings.copy_rate / 1e9))
    record_property("matmul ceiling TFLOP/s", three_digits(ceilings.matmul_rate / 1e12))
    record_property("dtype", name_of(ceilings.dtype))


def test_decode_attention(target: Target, ceilings: Ceilings, attention: AttentionSpec, record_property: Any) -> None:
    """Against copying: a decode reads every key and value once, and does little else."""
    for context in CONTEXTS:
        start = perf_counter()
        bench = AttentionBench(target, attention, NUM_REQS, context)
        bench.fill(ceilings.working_set(target) if context == CONTEXTS[-1] else 0)
        rate, tokens = bench.layer_bytes / bench.seconds_per_layer(query_len=1), context
        if perf_counter() - start > PATIENCE_S:
            break
    record_property("decode attention", f"{bench.backend.name}, {NUM_REQS} requests of {tokens} tokens, {HEADS}")
    record_property("decode attention GB/s", three_digits(rate / 1e9))
    record_property("decode attention / copy ceiling", three_digits(rate / ceilings.copy_rate))


def test_prefill_attention(target: Target, ceilings: Ceilings, attention: AttentionSpec, record_property: Any) -> None:
    """Against matrix products; an operation for each query and the keys before it, none for masked ones."""
    for prompt in PROMPTS:
        bench = AttentionBench(target, attention, 1, prompt)
        seconds, tokens = bench.seconds_per_layer(query_len=prompt), prompt
        if 4 * seconds > BUDGET_S:
            break
    rate = 2 * tokens * (tokens + 1) * NUM_HEADS * HEAD_DIM / seconds
    record_property("prefill attention", f"{bench.backend.name}, a prompt of {tokens} tokens, {HEADS}")
    record_property("prefill attention TFLOP/s", three_digits(rate / 1e12))
    record_property("prefill attention / matmul ceiling", three_digits(rate / ceilings.matmul_rate))


def test_linear_layers(target: Target, ceilings: Ceilings, record_property: Any) -> None:
    """One row against copying, since it reads the weight once; many rows against matrix products."""
    spec = LinearSpec(HIDDEN_SIZE, HIDDEN_SIZE, ceilings.dtype)
    bench = LinearBench(target, spec, ceilings.working_set(target))
    record_property("linear", f"{bench.backend.name}, {HIDDEN_SIZE} x {HIDDEN_SIZE}")
    rate = bench.weight_bytes / bench.seconds_per_layer(rows=1)
    record_property("linear, 1 row, GB/s", three_digits(rate / 1e9))
    record_property("linear, 1 row / copy ceiling", three_digits(rate / ceilings.copy_rate))
    for rows in (16, 256):
        operations = 2 * rows * HIDDEN_SIZE**2
        rate = operations / bench.seconds_per_layer(rows, ceilings.num_products(operations))
        record_property(f"linear, {rows} rows, TFLOP/s", three_digits(rate / 1e12))
        record_property(f"linear, {rows} rows / matmul ceiling", three_digits(rate / ceilings.matmul_rate))
