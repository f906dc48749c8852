"""Area "blocks": copies and swaps of cache blocks are bit-exact and touch no other block.

Blocks are filled and read by attention. Their bits are compared along the layout's `block_dim`, whatever they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from isthmus.conformance.attention_cases import VARIANTS, block_cases, tolerance
from isthmus.conformance.attention_harness import PagedCache, Row, skip_unsupported
from isthmus.conformance.compare import assert_close, assert_equal, name_of
from isthmus.conformance.plugin import is_thin, target_of
from isthmus.conformance.target import Target
from isthmus.platforms import AttentionBackend, AttentionSpec, KVCacheLayout
from isthmus.platforms.attention import KVCache

Table = tuple[int, ...]
Pairs = Sequence[tuple[int, int]]
"""(source block, destination block)"""

NUM_BLOCKS, NUM_HOST_BLOCKS = 20, 9
FIRST: Table = (11, 4, 17)
SECOND: Table = (2, 9, 14)
"""The tables of two sequences."""
FIRST_COPY: Table = (5, 16, 1)
FIRST_AGAIN: Table = (12, 3, 8)
SECOND_COPY: Table = (13, 19, 10)
"""Blocks that get copies of them. What is left is nobody's: 6, 7, 15, 18 and the null block."""
COPIES = ((11, 5), (9, 19), (4, 3), (14, 10), (4, 16), (11, 12), (2, 13), (17, 1), (17, 8))
ON_HOST: Table = (6, 0, 3)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    target = target_of(metafunc.config)
    cases = [
        (variant, dtype)
        for variant, dtype in block_cases(target.dtypes)
        if not is_thin(metafunc.config) or dtype == target.dtypes[0] or variant == "base"
    ]
    parameters = [
        pytest.param(backend, VARIANTS[variant].spec(dtype), id=f"{name}-{name_of(dtype)}-{variant}")
        for name, backend in target.attention_backends.items()
        for variant, dtype in cases
    ]
    metafunc.parametrize(("backend", "spec"), parameters)


def test_the_layout_counts_blocks(target: Target, backend: type[AttentionBackend], spec: AttentionSpec) -> None:
    """The engine sizes its pool by the bytes of one block."""
    skip_unsupported(target, backend, spec)
    one, many = (backend(spec, target.device).kv_cache_layout(count).tensors for count in (1, NUM_BLOCKS))
    assert len(one) == len(many) > 0, f"{len(one)} tensors for one block, {len(many)} for {NUM_BLOCKS}"
    for single, tensor in zip(one, many, strict=True):
        assert single.shape[single.block_dim] == 1, f"for one block: {single}; its size along block_dim must be 1"
        grown = list(single.shape)
        grown[single.block_dim] = NUM_BLOCKS
        assert tensor == replace(single, shape=tuple(grown)), f"for {NUM_BLOCKS} blocks {tensor}, for one {single}"


def test_copies(target: Target, backend: type[AttentionBackend], spec: AttentionSpec) -> None:
    """Several blocks at once, some of them twice, in no order."""
    skip_unsupported(target, backend, spec)
    sequences = Sequences(target, backend, spec)
    first, second = sequences.read(FIRST, FIRST), sequences.read(SECOND, SECOND)
    cache = sequences.cache
    before = snapshot(cache.tensors)
    cache.backend.copy_blocks(cache.tensors, *block_ids(COPIES, target))
    assert_moved(cache, cache.tensors, before, before, COPIES, what="copy_blocks")
    for table, expected in ((FIRST, first), (FIRST_COPY, first), (FIRST_AGAIN, first)):
        sequences.check(FIRST, table, expected, what=f"attention to blocks {table}, copied from {FIRST}")
    for table in (SECOND, SECOND_COPY):
        sequences.check(SECOND, table, second, what=f"attention to blocks {table}, copied from {SECOND}")


def test_swaps(target: Target, backend: type[AttentionBackend], spec: AttentionSpec) -> None:
    """To a cache on the host, and back to other blocks after the old ones were written over."""
    skip_unsupported(target, backend, spec)
    sequences = Sequences(target, backend, spec)
    first, second = sequences.read(FIRST, FIRST), sequences.read(SECOND, SECOND)
    cache = sequences.cache
    host = noise(cache.backend.kv_cache_layout(NUM_HOST_BLOCKS))
    device_before, host_before = snapshot(cache.tensors), snapshot(host)
    out, back = list(zip(FIRST, ON_HOST, strict=True)), list(zip(ON_HOST, FIRST_COPY, strict=True))

    cache.backend.swap_blocks(cache.tensors, host, *block_ids(out, target))
    assert_moved(cache, host, host_before, device_before, out, what="host cache after a swap to it")
    assert_moved(cache, cache.tensors, device_before, device_before, (), what="device cache after a swap from it")

    cache.leave_stale_values(FIRST)
    device_before, host_before = snapshot(cache.tensors), snapshot(host)
    cache.backend.swap_blocks(host, cache.tensors, *block_ids(back, target))
    assert_moved(cache, cache.tensors, device_before, host_before, back, what="device cache after a swap to it")
    assert_moved(cache, host, host_before, host_before, (), what="host cache after a swap from it")
    sequences.check(FIRST, FIRST_COPY, first, what=f"attention to blocks {FIRST_COPY}, swapped out and in")
    sequences.check(SECOND, SECOND, second, what=f"attention to blocks {SECOND}, which were not swapped")


class Sequences:
    """Two sequences that fill `FIRST` and `SECOND` of a cache to the last slot."""

    def __init__(self, target: Target, backend: type[AttentionBackend], spec: AttentionSpec) -> None:
        self.cache = PagedCache(target, backend, spec, NUM_BLOCKS)
        self._last_tokens = {table: self._fill(table) for table in (FIRST, SECOND)}

    def _fill(self, table: Table) -> Row:
        spec, generator = self.cache.spec, torch.Generator().manual_seed(sum(table))
        q, k, v = (
            torch.randn(len(table) * spec.block_size, heads, spec.head_dim, generator=generator).to(spec.dtype)
            for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        self.cache.fill(table, k, v)
        return Row(q[-1:], k[-1:], v[-1:], first=len(q) - 1, block_ids=table)

    def read(self, sequence: Table, table: Table) -> torch.Tensor:
        """What a sequence's last token sees in the blocks of `table`; its own key and value are written once more."""
        return self.cache.step([replace(self._last_tokens[sequence], block_ids=table)])

    def check(self, sequence: Table, table: Table, expected: torch.Tensor, *, what: str) -> None:
        """`read` gives what it gave before, but for the order of sums, which is not asked here."""
        limit = tolerance(self.cache.spec.dtype)
        assert_close(self.read(sequence, table), expected, rtol=limit, atol=limit, what=what)


def block_ids(pairs: Pairs, target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources and destinations, int64 on the device, as the engine makes them."""
    src, dst = torch.tensor(pairs, dtype=torch.int64, device=target.device).unbind(1)
    return src, dst


def snapshot(tensors: KVCache) -> KVCache:
    """The same bits on the host, in memory of their own."""
    return tuple(tensor.to("cpu", copy=True) for tensor in tensors)


def noise(layout: KVCacheLayout) -> KVCache:
    """A host cache of random bytes."""
    generator = torch.Generator().manual_seed(3)
    return tuple(
        torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
        .view(tensor.dtype)
        .view(tensor.shape)
        for tensor in layout.tensors
    )


def assert_moved(
    cache: PagedCache, after: KVCache, before: KVCache, source: KVCache, pairs: Pairs, *, what: str
) -> None:
    """Every block of `after` is as in `before`, but for the destinations, which are as their sources in `source`."""
    origin = {dst: src for src, dst in pairs}
    layout = cache.backend.kv_cache_layout(1).tensors
    for index, (spec, now, old, new) in enumerate(zip(layout, snapshot(after), before, source, strict=True)):
        for block in range(now.shape[spec.block_dim]):
            told = f"from block {origin[block]}" if block in origin else "not to be touched"
            expected = (
                new.select(spec.block_dim, origin[block]) if block in origin else old.select(spec.block_dim, block)
            )
            assert_equal(
                now.select(spec.block_dim, block), expected, what=f"{what}: block {block}, {told}, tensor {index}"
            )
