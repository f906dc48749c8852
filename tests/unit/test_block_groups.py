"""Which layers share blocks, and how a model's memory is shared between the groups."""

from __future__ import annotations

import pytest
import torch

from isthmus.layers.env import AttentionGroups
from isthmus.platforms import AttentionSpec
from isthmus.platforms.native_attention import NativeAttentionBackend
from isthmus.scheduler.output import GroupLimits
from isthmus.worker.block_groups import BlockGroups

CPU = torch.device("cpu")
MAX_LEN = 64
BLOCK_BYTES = 2 * 4 * 4 * 4
"""Keys and values of one layer: 4 slots of one head of 4 float32."""


def make(*windows: int | None, num_kv_heads: int = 1) -> BlockGroups:
    """The groups of a model whose layers have these windows."""
    attention = AttentionGroups(lambda spec: NativeAttentionBackend(spec, CPU))
    for window in windows:
        attention.add_layer(spec(window, num_kv_heads))
    return BlockGroups(attention, MAX_LEN)


def spec(window: int | None, num_kv_heads: int = 1) -> AttentionSpec:
    return AttentionSpec(4, num_kv_heads, 4, 4, torch.float32, torch.float32, 1.0, sliding_window=window)


def windows(groups: BlockGroups) -> list[int | None]:
    return [group.window for group in groups.groups]


def test_layers_without_a_window_are_the_first_group() -> None:
    groups = make(16, 8, None, 16, 8, None)
    assert windows(groups) == [None, 8, 16]
    assert groups.of_layer() == [2, 1, 0, 2, 1, 0]
    assert [group.bytes_per_block for group in groups.groups] == [2 * BLOCK_BYTES] * 3


def test_a_model_of_windows_alone_has_no_other_group() -> None:
    groups = make(8, 8, 8)
    assert windows(groups) == [8]
    assert groups.groups[0].bytes_per_block == 3 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("window", "expected"), [(MAX_LEN - 1, [None, MAX_LEN - 1]), (MAX_LEN, [None]), (MAX_LEN + 1, [None])]
)
def test_a_window_that_no_sequence_outgrows_is_none(window: int, expected: list[int | None]) -> None:
    assert windows(make(window, None)) == expected


def test_layers_of_different_shapes_share_blocks_if_they_see_the_same() -> None:
    attention = AttentionGroups(lambda spec: NativeAttentionBackend(spec, CPU))
    for window, num_kv_heads in ((None, 1), (8, 1), (None, 2), (8, 4)):
        attention.add_layer(spec(window, num_kv_heads))
    groups = BlockGroups(attention, MAX_LEN)
    assert groups.of_attention == [0, 1, 0, 1]
    assert [group.bytes_per_block for group in groups.groups] == [3 * BLOCK_BYTES, 5 * BLOCK_BYTES]
    assert [layout.tensors[0].shape[:1] for layout in groups.layouts([7, 2])] == [(7,), (2,), (7,), (2,)]
    assert groups.nbytes([7, 2]) == sum(layout.nbytes for layout in groups.layouts([7, 2]))


def test_a_model_without_attention_has_blocks_that_cost_nothing() -> None:
    groups = make()
    assert windows(groups) == [None]
    assert groups.nbytes([1000]) == 0
    assert groups.share(0, 50, [None]) == [50]


def test_groups_get_the_number_that_was_asked_for_or_what_is_of_use() -> None:
    groups = make(None, 8, 16)
    assert groups.counts(100, [None, 30, 200]) == [100, 30, 100]


PRICE = BLOCK_BYTES
"""Of a block of a group with one layer."""


@pytest.mark.parametrize(
    ("num_blocks", "expected"),
    [
        (0, [0, 0]),
        (1, [1, 0]),
        (2, [1, 1]),
        (7, [4, 3]),
        (20, [10, 10]),
        (21, [11, 10]),
        (29, [19, 10]),
        (10**6, [50, 10]),
    ],
)
def test_groups_grow_alike_until_the_window_has_enough(num_blocks: int, expected: list[int]) -> None:
    """The budget pays for `num_blocks` blocks of one layer; 10 of the second group are of use, 50 of the first."""
    assert make(None, 8).share(num_blocks * PRICE, 50, [None, 10]) == expected


def test_a_block_costs_what_the_layers_of_its_group_hold() -> None:
    """One layer of five sees everything, as in Gemma 3: past the windows' share, the budget buys five times as many."""
    groups = make(8, 8, None, 8, 8)
    assert groups.share(100 * PRICE, 1000, [None, 12]) == [100 - 4 * 12, 12]


@pytest.mark.parametrize("budget", range(0, 60 * PRICE, 7 * PRICE // 2))
@pytest.mark.parametrize("useful", [[None, 3, 9], [None, 9, 3], [None, 5, 5], [None, 40, 40], [None, 1, 1]])
def test_a_share_is_within_the_budget_and_wastes_less_than_one_block(budget: int, useful: list[int | None]) -> None:
    groups = make(None, 8, 16, 16)
    counts = groups.share(budget, 20, useful)
    limits = groups.counts(20, useful)
    assert all(0 <= count <= limit for count, limit in zip(counts, limits, strict=True))
    left = budget - groups.nbytes(counts)
    growing = [g for g, count, limit in zip(groups.groups, counts, limits, strict=True) if count < limit]
    assert left >= 0
    assert not growing or left < sum(group.bytes_per_block for group in growing)


def test_limits_are_those_of_the_groups() -> None:
    groups = make(None, 8)
    assert groups.limits([7, 3], [4, 4]) == (GroupLimits(7, 4, None), GroupLimits(3, 4, 8))
