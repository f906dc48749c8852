"""The blocks of one group of layers: what a window sees, what is found of a prefix, what moves to the host and back."""

from __future__ import annotations

import math
import random

import pytest

from isthmus.scheduler.block_group import BlockGroup, num_held, window_blocks
from isthmus.scheduler.block_pool import NULL_BLOCK
from isthmus.scheduler.output import NO_BLOCK_OPS, BlockOps

BLOCK = 4


def make(
    num_blocks: int = 8,
    *,
    window: int | None = None,
    num_host_blocks: int = 0,
    most_tokens: int = 1,
    saves: bool = True,
) -> BlockGroup:
    return BlockGroup(
        num_blocks,
        BLOCK,
        num_host_blocks=num_host_blocks,
        window=window,
        most_tokens=most_tokens,
        saves_evicted=saves,
    )


def name(index: int) -> bytes:
    return bytes([index]) * 32


def fill(group: BlockGroup, count: int, first: int = 0) -> list[int]:
    """A table of `count` published blocks."""
    table = group.take(count)
    for index, block_id in enumerate(table):
        group.pool.publish(block_id, name(first + index))
    return table


# What a window sees.


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 16, 17])
def test_the_first_visible_block_holds_the_first_token_that_the_next_one_sees(window: int, block_size: int) -> None:
    group = BlockGroup(1, block_size, window=window)
    for position in range(80):
        seen = [earlier for earlier in range(position + 1) if position - earlier < window]
        assert group.first_visible(position) == seen[0] // block_size
        assert BlockGroup(1, block_size).first_visible(position) == 0


@pytest.mark.parametrize("most_tokens", [1, 2, 5, 16])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 16, 17])
def test_a_sequence_holds_as_many_blocks_as_its_window_and_a_step_and_no_more(
    window: int, block_size: int, most_tokens: int
) -> None:
    """Wherever the step begins. The bound is never too low, and by one block too high at most."""
    group = BlockGroup(1, block_size, window=window, most_tokens=most_tokens)
    held = [
        -(-(computed + step) // block_size) - group.first_visible(computed)
        for computed in range(200)
        for step in range(1, most_tokens + 1)
    ]
    bound = window_blocks(window, most_tokens, block_size)
    assert bound - 1 <= max(held) <= bound
    assert group.most_blocks(10_000) == bound
    assert group.most_blocks(block_size) == 1


def test_without_a_window_a_sequence_holds_all_its_blocks() -> None:
    assert [make().most_blocks(count) for count in (0, 1, 4, 5, 400)] == [0, 1, 1, 2, 100]


def test_the_longest_sequence_is_that_of_the_pool_or_any() -> None:
    assert make(5).longest == 20
    assert window_blocks(8, 5, BLOCK) == 4
    assert window_blocks(8, 2, BLOCK) == 4
    assert window_blocks(8, 1, BLOCK) == 3
    assert make(3, window=8, most_tokens=5).longest == 12
    assert make(4, window=8, most_tokens=5).longest == math.inf


def test_blocks_before_the_window_are_given_back_once() -> None:
    group = make(window=5)
    table = group.take(5)
    before = table.copy()
    group.drop_unseen(table, 8)
    assert table == [NULL_BLOCK, *before[1:]]
    group.drop_unseen(table, 8)
    assert group.pool.num_used == 4
    group.drop_unseen(table, 20)
    assert table == [NULL_BLOCK] * 4 + before[4:]
    assert group.pool.num_used == 1
    group.check_integrity([table], [])


def test_a_table_that_ends_before_the_window_is_emptied_and_no_more() -> None:
    """After a step that computed more than the window holds."""
    group = make(window=2)
    table = group.take(2)
    group.drop_unseen(table, 100)
    assert table == [NULL_BLOCK] * 2
    assert group.pool.num_used == 0


def test_nulls_are_not_held_and_not_shared() -> None:
    group = make()
    table = [NULL_BLOCK, *fill(group, 2), NULL_BLOCK]
    assert num_held(table) == 2
    group.share(table)
    assert [group.pool.num_references(block_id) for block_id in table] == [0, 2, 2, 0]
    group.release(table.copy())
    assert group.num_revived(table) == 0
    group.release(table.copy())
    assert group.num_revived(table) == 2


# What is found of a prefix.


@pytest.mark.parametrize("window", [None, 1, 4, 5, 9, 10, 40])
def test_a_hit_ends_where_all_that_is_seen_next_is_there(window: int | None) -> None:
    """Against the definition, for random sets of blocks that are on the device, on the host, or nowhere."""
    rng = random.Random(1)
    for _ in range(300):
        group = make(10, window=window, num_host_blocks=10)
        assert group.host_pool is not None
        count = rng.randrange(9)
        there = set()
        for index in range(count):
            place = rng.choice(("device", "device", "host", "nowhere"))
            if place != "nowhere":
                there.add(index)
                pool = group.pool if place == "device" else group.host_pool
                pool.publish(pool.take(1)[0], name(index))
        usable = [
            end
            for end in range(count + 1)
            if set(range(group.first_visible(end * BLOCK), end)) - there == set() or not end
        ]
        hashes = [name(index) for index in range(count)]
        if window is None:
            usable = [end for end in usable if set(range(end)) <= there]
        assert group.usable_hit(hashes, count) == max(usable)


def test_a_hit_has_nulls_before_the_window_and_where_only_the_host_has_the_block() -> None:
    group = make(window=9, num_host_blocks=4)
    assert group.host_pool is not None
    table = fill(group, 4)
    [on_host] = group.host_pool.take(1)
    group.host_pool.publish(on_host, name(4))
    hashes = [name(index) for index in range(5)]
    assert group.usable_hit(hashes, 5) == 5
    assert group.hit(hashes, 5) == ([NULL_BLOCK] * 3 + [table[3], NULL_BLOCK], [(4, on_host)])


def test_a_table_is_given_back_tail_first_so_that_its_beginning_is_found_longest() -> None:
    group = make(3)
    table = fill(group, 3)
    group.release(table)
    assert table == []
    assert [group.usable_hit([name(index) for index in range(3)], 3)] == [3]
    for left in (2, 1, 0):
        group.take(1)
        assert group.usable_hit([name(index) for index in range(3)], 3) == left


# To the host and back.


def test_content_that_is_lost_goes_to_the_host() -> None:
    group = make(2, num_host_blocks=3)
    assert group.host_pool is not None
    lost = fill(group, 2)
    group.release(lost.copy())
    taken = group.take(2)
    assert set(taken) == set(lost)
    ops = group.take_block_ops()
    assert [source for source, _ in ops.swap_out] == taken
    for (_, host_id), index in zip(ops.swap_out, (1, 0), strict=True):
        assert group.host_pool.find(name(index)) == host_id
        assert group.host_pool.is_free(host_id)
    assert group.hit([name(0)], 1) == ([NULL_BLOCK], [(0, ops.swap_out[1][1])])


@pytest.mark.parametrize("why", ["no host", "not asked", "no hash", "host is full", "is there"])
def test_content_is_not_saved_in_vain(why: str) -> None:
    group = make(1, num_host_blocks=0 if why == "no host" else 1, saves=why != "not asked")
    block = group.take(1)
    if why != "no hash":
        group.pool.publish(block[0], name(0))
    group.release(block)
    if group.host_pool is not None and why == "host is full":
        group.host_pool.take(1)
    if group.host_pool is not None and why == "is there":
        [host_id] = group.host_pool.take(1)
        group.host_pool.publish(host_id, name(0))
        group.host_pool.release([host_id])
    group.take(1)
    assert group.take_block_ops() is NO_BLOCK_OPS


def test_a_host_block_of_a_move_is_nobody_elses_until_the_moves_are_taken() -> None:
    """One that was just saved may not become another's place, nor may one that is about to be read."""
    group = make(3, num_host_blocks=2)
    assert group.host_pool is not None
    table = fill(group, 2)
    group.release([table[0]])
    kept = [table[1]]
    fresh = group.take(2)
    assert group.host_pool.num_free == 1
    [host_id] = group.move_to_host(kept)
    assert group.host_pool.num_free == 0
    ops = group.take_block_ops()
    assert len({target for _, target in ops.swap_out}) == len(ops.swap_out) == 2
    group.release_host([host_id])
    group.release(kept)
    group.release(fresh)
    assert group.host_pool.num_free == 2
    group.pin(1)
    assert group.host_pool.num_free == 1
    [target] = [group.bring(1)]
    assert group.take_block_ops().swap_in == ((1, target),)
    assert group.host_pool.num_free == 2


def test_a_swapped_table_keeps_its_nulls() -> None:
    group = make(num_host_blocks=4)
    blocks = group.take(2)
    table = [NULL_BLOCK, NULL_BLOCK, *blocks]
    host_table = group.move_to_host(table)
    assert host_table[:2] == [NULL_BLOCK, NULL_BLOCK]
    assert group.take_block_ops().swap_out == tuple(zip(blocks, host_table[2:], strict=True))
    group.release(table)
    group.check_integrity([], [host_table])
    group.release_host(host_table)
    assert host_table == []
    group.check_integrity([], [])


def test_moves_are_given_once() -> None:
    group = make(num_host_blocks=2)
    group.copy(1, 2)
    assert group.take_block_ops() == BlockOps(copy=((1, 2),))
    assert group.take_block_ops() is NO_BLOCK_OPS


def test_forgetting_is_of_both_pools() -> None:
    group = make(1, num_host_blocks=1)
    group.release(fill(group, 1))
    group.release(fill(group, 1, first=1))
    hashes = [[name(index)] for index in range(2)]
    assert [group.usable_hit(one, 1) for one in hashes] == [1, 1]
    group.forget_all()
    assert [group.usable_hit(one, 1) for one in hashes] == [0, 0]


@pytest.mark.parametrize("fault", ["device", "host"])
def test_integrity_sees_a_block_that_no_table_has(fault: str) -> None:
    group = make(num_host_blocks=2)
    assert group.host_pool is not None
    (group.pool if fault == "device" else group.host_pool).take(1)
    with pytest.raises(RuntimeError, match="1 references, tables hold 0"):
        group.check_integrity([], [])


def test_a_group_has_no_host_and_small_steps_unless_told() -> None:
    assert BlockGroup(8, BLOCK).host_pool is None
    assert BlockGroup(8, BLOCK, window=8).most_blocks(100) == window_blocks(8, 1, BLOCK)
