"""Block operations on the pool in memory."""

from __future__ import annotations

import pytest
import torch

from isthmus.layers.env import AttentionGroups
from isthmus.platforms import AttentionSpec
from isthmus.platforms.native_attention import NativeAttentionBackend
from isthmus.scheduler.output import NO_BLOCK_OPS, BlockOps
from isthmus.testing.null import NullPlatform
from isthmus.worker.block_groups import BlockGroups
from isthmus.worker.kv_cache import KVCachePool

CPU = torch.device("cpu")
NUM_BLOCKS = (5, 3)
NUM_HOST_BLOCKS = (4, 2)
GROUP_OF_LAYER = (0, 1, 0)


def make(*num_host_blocks: int) -> KVCachePool:
    """Two layers that see everything, and one between them with a window."""
    attention = AttentionGroups(lambda spec: NativeAttentionBackend(spec, CPU))
    for window in (None, 8, None):
        attention.add_layer(AttentionSpec(2, 1, 4, 4, torch.float32, torch.float32, 1.0, sliding_window=window))
    groups = BlockGroups(attention, max_model_len=64)
    return KVCachePool(attention, groups, NUM_BLOCKS, NullPlatform(), CPU, num_host_blocks)


def mark(caches: tuple[tuple[torch.Tensor, ...], ...]) -> None:
    """Each block of each layer holds its own number."""
    for layer, tensors in enumerate(caches):
        for tensor in tensors:
            for block in range(len(tensor)):
                tensor[block] = 100 * layer + block


def content(caches: tuple[tuple[torch.Tensor, ...], ...], layer: int) -> list[int]:
    """Which block each block of the layer holds, in its keys and its values alike."""
    keys, values = (tensor.flatten(1) for tensor in caches[layer])
    assert torch.equal(keys, values)
    assert torch.equal(keys, keys[:, :1].expand_as(keys))
    return [int(number) % 100 for number in keys[:, 0]]


def test_each_layer_has_the_blocks_of_its_group_and_the_null_block_and_is_zero() -> None:
    pool = make(*NUM_HOST_BLOCKS)
    for caches, counts in ((pool.caches, NUM_BLOCKS), (pool.host_caches, NUM_HOST_BLOCKS)):
        for group, layer in zip(GROUP_OF_LAYER, caches, strict=True):
            assert [tensor.shape for tensor in layer] == [(counts[group] + 1, 4, 1, 4)] * 2
            assert not any(tensor.any() for tensor in layer)


def test_without_host_blocks_there_is_no_host_memory() -> None:
    assert make().host_caches == make(0, 0).host_caches == ()


@pytest.mark.parametrize("group", [0, 1])
def test_copies_happen_in_every_layer_of_the_group_and_in_no_other(group: int) -> None:
    pool = make()
    mark(pool.caches)
    ops = [NO_BLOCK_OPS, NO_BLOCK_OPS]
    ops[group] = BlockOps(copy=((2, 3), (2, 1)))
    pool.apply(ops)
    for layer, of_group in enumerate(GROUP_OF_LAYER):
        untouched = list(range(NUM_BLOCKS[of_group] + 1))
        assert content(pool.caches, layer) == ([0, 2, 2, 2, *untouched[4:]] if of_group == group else untouched)


@pytest.mark.parametrize("group", [0, 1])
def test_what_is_swapped_out_and_in_is_the_same(group: int) -> None:
    pool = make(*NUM_HOST_BLOCKS)
    mark(pool.caches)
    ops = [NO_BLOCK_OPS, NO_BLOCK_OPS]
    ops[group] = BlockOps(swap_out=((3, 1), (1, 2)))
    pool.apply(ops)
    ops[group] = BlockOps(swap_in=((1, 2), (2, 3)))
    pool.apply(ops)
    for layer, of_group in enumerate(GROUP_OF_LAYER):
        untouched = list(range(NUM_BLOCKS[of_group] + 1))
        assert content(pool.caches, layer) == ([0, 1, 3, 1, *untouched[4:]] if of_group == group else untouched)
        assert content(pool.host_caches, layer)[:3] == ([0, 3, 1] if of_group == group else [0, 0, 0])


def test_out_goes_before_in_and_in_before_copies() -> None:
    """A block that leaves the device is handed out again in the same step, filled from the host, and copied."""
    pool = make(*NUM_HOST_BLOCKS)
    mark(pool.caches)
    pool.apply([BlockOps(swap_out=((5, 3),)), NO_BLOCK_OPS])
    pool.apply([BlockOps(swap_out=((2, 4),), swap_in=((3, 2),), copy=((2, 1),)), NO_BLOCK_OPS])
    assert content(pool.caches, 0) == [0, 5, 5, 3, 4, 5]
    assert content(pool.host_caches, 0) == [0, 0, 0, 5, 2]


@pytest.mark.parametrize("ops", [BlockOps(swap_out=((1, 1),)), BlockOps(swap_in=((1, 1),))])
@pytest.mark.parametrize("group", [0, 1])
def test_swaps_are_refused_and_never_dropped(group: int, ops: BlockOps) -> None:
    both = [NO_BLOCK_OPS, NO_BLOCK_OPS]
    both[group] = ops
    with pytest.raises(ValueError, match="asks for swaps, and this worker has no host pool"):
        make().apply(both)
