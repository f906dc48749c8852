"""Block operations on the pool in memory."""

from __future__ import annotations

import pytest
import torch

from isthmus.layers.env import AttentionGroups
from isthmus.platforms import AttentionSpec
from isthmus.platforms.native_attention import NativeAttentionBackend
from isthmus.scheduler.output import BlockOps
from isthmus.testing.null import NullPlatform
from isthmus.worker.kv_cache import KVCachePool

CPU = torch.device("cpu")


@pytest.fixture
def pool() -> KVCachePool:
    groups = AttentionGroups(lambda spec: NativeAttentionBackend(spec, CPU))
    for window in (None, 8, None):
        groups.add_layer(AttentionSpec(2, 1, 4, 4, torch.float32, torch.float32, 1.0, sliding_window=window))
    return KVCachePool(groups, 5, NullPlatform(), CPU)


def test_a_pool_has_every_layer_and_the_null_block_and_is_zero(pool: KVCachePool) -> None:
    assert [len(layer) for layer in pool.caches] == [2, 2, 2]
    assert all(tensor.shape == (6, 4, 1, 4) and not tensor.any() for layer in pool.caches for tensor in layer)


def test_copies_happen_in_every_layer(pool: KVCachePool) -> None:
    for number, layer in enumerate(pool.caches):
        for tensor in layer:
            tensor[2] = number + 1
    pool.apply(BlockOps(copy=((2, 4), (2, 5))))
    for number, layer in enumerate(pool.caches):
        for tensor in layer:
            assert (tensor[4:] == number + 1).all()
            assert not tensor[[0, 1, 3]].any()


@pytest.mark.parametrize("ops", [BlockOps(swap_out=((1, 1),)), BlockOps(swap_in=((1, 1),))])
def test_swaps_are_refused_and_never_dropped(pool: KVCachePool, ops: BlockOps) -> None:
    with pytest.raises(ValueError, match="asks for swaps, and this worker has no host pool"):
        pool.apply(ops)
