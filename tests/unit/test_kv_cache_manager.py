"""Prefix lookup, allocation, publication and freeing of block tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from isthmus.sampling_params import SamplingParams
from isthmus.scheduler.block_group import BlockGroup
from isthmus.scheduler.block_pool import NULL_BLOCK
from isthmus.scheduler.kv_cache_manager import NO_HIT, GroupHit, KVCacheManager, PrefixHit
from isthmus.scheduler.output import BlockOps
from isthmus.scheduler.request import Request

BLOCK_SIZE = 4


def make_manager(
    num_blocks: int = 8, block_size: int = BLOCK_SIZE, *, caching: bool = True, num_host_blocks: int = 0
) -> KVCacheManager:
    """One group without a window."""
    group = BlockGroup(num_blocks, block_size, num_host_blocks=num_host_blocks, saves_evicted=caching)
    return KVCacheManager([group], enable_prefix_caching=caching, hash_seed=0)


def make_windowed(window: int, num_blocks: int = 8, *, num_host_blocks: int = 0) -> KVCacheManager:
    """Two groups: one that sees everything, one that sees `window` tokens."""
    groups = [
        BlockGroup(num_blocks, BLOCK_SIZE, num_host_blocks=num_host_blocks, window=seen, most_tokens=64)
        for seen in (None, window)
    ]
    return KVCacheManager(groups, hash_seed=0)


def make_request(tokens: Sequence[int], request_id: str = "a", *, salt: str | None = None) -> Request:
    return Request(request_id, tokens, SamplingParams(cache_salt=salt))


def compute(manager: KVCacheManager, request: Request, hit: PrefixHit = NO_HIT) -> None:
    """All of its tokens in one step."""
    assert manager.allocate(request, request.num_tokens - hit.num_cached_tokens, hit) is not None
    request.num_computed_tokens = request.num_tokens
    manager.publish(request, request.num_tokens)


def compute_and_free(manager: KVCacheManager, request: Request) -> list[int]:
    """The blocks it had."""
    compute(manager, request, manager.lookup(request))
    block_ids = request.block_ids.copy()
    manager.free(request)
    return block_ids


def found(hit: PrefixHit, group: int = 0) -> list[int]:
    """The hit's table in a group."""
    return list(hit.groups[group].block_ids)


def num_cached(manager: KVCacheManager, tokens: Sequence[int], *, salt: str | None = None) -> int:
    return manager.lookup(make_request(tokens, salt=salt)).num_cached_tokens


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_num_blocks_for(num_tokens: int, num_blocks: int) -> None:
    assert make_manager().num_blocks_for(num_tokens) == num_blocks


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, 0), (15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (48, 32), (49, 48)]
)
def test_a_prompt_seen_before_is_a_hit_up_to_its_last_token(num_tokens: int, expected: int) -> None:
    manager = make_manager(block_size=16)
    prompt = list(range(num_tokens))
    first = compute_and_free(manager, make_request(prompt))
    hit = manager.lookup(make_request(prompt, "b"))
    assert hit == (PrefixHit(expected, [GroupHit(first[: expected // 16], [])]) if expected else NO_HIT)


def test_a_hit_ends_at_the_first_difference() -> None:
    manager = make_manager()
    compute_and_free(manager, make_request(range(12)))
    assert num_cached(manager, [*range(8), 99, *range(9, 13)]) == 8
    assert num_cached(manager, [99, *range(1, 13)]) == 0


def test_equal_tokens_after_another_beginning_are_no_hit() -> None:
    manager = make_manager()
    compute_and_free(manager, make_request([1, 1, 1, 1, 2, 2, 2, 2, 3]))
    assert num_cached(manager, [2, 2, 2, 2, 3]) == 0
    assert num_cached(manager, [9, 9, 9, 9, 2, 2, 2, 2, 3]) == 0


def test_salts_keep_prefixes_apart() -> None:
    manager = make_manager()
    compute_and_free(manager, make_request(range(9), salt="alice"))
    assert num_cached(manager, range(9), salt="alice") == 8
    assert num_cached(manager, range(9), salt="bob") == 0
    assert num_cached(manager, range(9)) == 0


def test_prompt_logprobs_never_read_the_cache() -> None:
    manager = make_manager()
    compute_and_free(manager, make_request(range(9)))
    assert manager.lookup(Request("b", range(9), SamplingParams(prompt_logprobs=0))) == NO_HIT


def test_without_prefix_caching_nothing_is_found_or_indexed() -> None:
    manager = make_manager(caching=False)
    request = make_request(range(9))
    compute_and_free(manager, request)
    assert num_cached(manager, range(9)) == 0
    assert request.block_hashes == []


def test_hashes_repeat_for_a_given_seed_and_differ_without_one() -> None:
    def hashes(manager: KVCacheManager) -> list[bytes]:
        request = make_request(range(9))
        compute(manager, request)
        return request.block_hashes

    fixed, random = hashes(make_manager()), [hashes(KVCacheManager([BlockGroup(8, BLOCK_SIZE)])) for _ in range(2)]
    assert fixed == hashes(make_manager())
    assert len(fixed) == len(set(fixed)) == 2
    assert random[0] != random[1]


def test_another_seed_gives_other_hashes() -> None:
    managers = [KVCacheManager([BlockGroup(8, BLOCK_SIZE)], hash_seed=seed) for seed in (0, 1)]
    first, second = (manager._hashes(make_request(range(4)), 1) for manager in managers)
    assert first != second


def test_what_the_table_has_is_not_needed_again() -> None:
    manager = make_manager(num_blocks=3)
    request = make_request(range(12))
    manager.allocate(request, 8)
    assert manager.can_allocate(request, 12, NO_HIT)
    assert not manager.can_allocate(request, 13, NO_HIT)


def test_blocks_are_kept_free_in_the_first_group_only() -> None:
    manager = make_windowed(window=4, num_blocks=4)
    request = make_request(range(16))
    full, windowed = manager.groups
    full.pool.forget_all()
    assert not manager.can_allocate(request, 16, NO_HIT, keep_free=1)
    assert manager.allocate(request, 16, keep_free=1) is None
    assert manager.can_allocate(request, 12, NO_HIT, keep_free=1)
    windowed.pool.take(1)
    assert manager.can_allocate(request, 12, NO_HIT, keep_free=1)
    assert manager.allocate(request, 12, keep_free=1) is not None


def test_allocate_returns_what_was_added() -> None:
    manager = make_manager()
    request = make_request(range(9))
    assert manager.allocate(request, 5) == [1, 2]
    request.num_computed_tokens = 5
    assert manager.allocate(request, 3) == []
    request.num_computed_tokens = 8
    assert manager.allocate(request, 1) == [3]
    assert request.block_ids == [1, 2, 3]


def test_allocate_is_all_or_nothing() -> None:
    manager = make_manager(num_blocks=2)
    request = make_request(range(9))
    assert manager.allocate(request, 9) is None
    assert request.block_ids == []
    assert manager.pool.num_free == 2
    assert manager.allocate(request, 8) == [1, 2]


def test_a_hit_that_is_free_costs_a_free_block() -> None:
    manager = make_manager(num_blocks=3)
    compute_and_free(manager, make_request(range(8)))
    request = make_request(range(13), "b")
    hit = manager.lookup(request)
    assert found(hit) == [1, 2]
    assert manager.can_allocate(request, 12, hit)
    assert not manager.can_allocate(request, 13, hit)
    assert not manager.can_allocate(request, 12, hit, keep_free=1)
    assert manager.allocate(request, 5, hit) is None
    assert manager.pool.num_free == 3


def test_a_hit_in_use_costs_nothing_and_is_shared() -> None:
    manager = make_manager(num_blocks=3)
    first, second = make_request(range(8)), make_request([*range(8), 99], "b")
    compute(manager, first)
    hit = manager.lookup(second)
    assert manager.allocate(second, 1, hit) == [1, 2, 3]
    manager.check_integrity([first, second])
    manager.free(first)
    assert manager.pool.num_free == 0
    manager.check_integrity([second])


def test_a_hit_is_not_evicted_to_make_room_for_its_own_request() -> None:
    manager = make_manager(num_blocks=3)
    compute_and_free(manager, make_request(range(9)))
    request = make_request([*range(4), *range(50, 57)], "b")
    hit = manager.lookup(request)
    assert found(hit) == [1]
    added = manager.allocate(request, 7, hit)
    assert added is not None
    assert added[0] == 1
    assert sorted(added) == [1, 2, 3]


def test_only_full_blocks_of_valid_tokens_are_published() -> None:
    manager = make_manager()
    request = make_request(range(12))
    manager.allocate(request, 12)
    manager.publish(request, 7)
    assert num_cached(manager, range(13)) == 4
    manager.publish(request, 8)
    assert num_cached(manager, range(13)) == 8
    assert request.num_published_blocks == 2


def test_blocks_filled_by_outputs_are_found_too() -> None:
    manager = make_manager()
    request = make_request(range(3))
    request.token_ids += [3, 4, 5, 6, 7]
    compute_and_free(manager, request)
    assert num_cached(manager, range(9)) == 8


def test_the_shared_beginning_outlives_the_tail() -> None:
    manager = make_manager(num_blocks=4)
    assert compute_and_free(manager, make_request(range(16))) == [1, 2, 3, 4]
    prompt = [*range(16), 16]
    for num_evicted, expected in enumerate((16, 12, 8, 4, 0)):
        assert num_cached(manager, prompt) == expected, f"{num_evicted} blocks evicted"
        if expected:
            manager.pool.take(1)


def test_a_partly_filled_block_is_reused_before_any_cached_one() -> None:
    manager = make_manager(num_blocks=3)
    assert compute_and_free(manager, make_request(range(10))) == [1, 2, 3]
    assert manager.pool.take(3) == [3, 2, 1]


def test_a_duplicate_is_not_merged_and_not_found() -> None:
    manager = make_manager()
    first, second = make_request(range(8)), make_request(range(8), "b")
    for request in (first, second):
        assert manager.allocate(request, 8) is not None
    manager.publish(first, 8)
    manager.publish(second, 8)
    assert (first.block_ids, second.block_ids) == ([1, 2], [3, 4])
    assert found(manager.lookup(make_request(range(9), "c"))) == [1, 2]


def test_free_empties_the_table() -> None:
    manager = make_manager()
    request = make_request(range(8))
    compute(manager, request)
    manager.free(request)
    assert (request.block_ids, request.num_published_blocks, manager.pool.num_free) == ([], 0, 8)


def test_integrity_counts_the_tables() -> None:
    manager = make_manager()
    request = make_request(range(8))
    compute(manager, request)
    manager.check_integrity([request])
    with pytest.raises(RuntimeError, match=re.escape("block 1 has 1 references, tables hold 0")):
        manager.check_integrity([])


def test_without_moves_there_are_none() -> None:
    assert make_manager().take_block_ops() == (BlockOps(),)


# To the host and back


def swapped(manager: KVCacheManager, request: Request) -> BlockOps:
    """Compute it, move it out; the moves."""
    compute(manager, request)
    assert manager.swap_out(request) is not None
    (ops,) = manager.take_block_ops()
    return ops


def test_a_victim_is_moved_block_by_block_and_back() -> None:
    manager = make_manager(caching=False, num_host_blocks=8)
    request = make_request(range(10))
    assert swapped(manager, request) == BlockOps(swap_out=((1, 1), (2, 2), (3, 3)))
    assert (request.block_ids, request.host_tables, manager.pool.num_free) == ([], [[1, 2, 3]], 8)
    manager.check_integrity([], [request])
    manager.pool.take(3)
    assert manager.swap_in(request) == 3
    assert manager.take_block_ops() == (BlockOps(swap_in=((1, 4), (2, 5), (3, 6))),)
    assert (request.block_ids, request.host_tables) == ([4, 5, 6], [])
    assert manager.host_pool is not None
    assert manager.host_pool.num_free == 8


def test_only_computed_blocks_are_moved() -> None:
    manager = make_manager(caching=False, num_host_blocks=8)
    request = make_request(range(12))
    manager.allocate(request, 12)
    request.num_computed_tokens = 5
    assert manager.swap_out(request) == 2


def test_without_room_on_the_host_nothing_is_moved() -> None:
    manager = make_manager(caching=False, num_host_blocks=2)
    request = make_request(range(10))
    compute(manager, request)
    assert manager.swap_out(request) is None
    assert (request.block_ids, request.host_tables) == ([1, 2, 3], [])
    assert manager.take_block_ops() == (BlockOps(),)


def test_without_room_on_the_device_nothing_comes_back() -> None:
    manager = make_manager(num_blocks=4, caching=False, num_host_blocks=8)
    request = make_request(range(10))
    swapped(manager, request)
    manager.pool.take(1)
    assert manager.swap_in(request, keep_free=1) is None
    assert request.host_tables == [[1, 2, 3]]
    assert manager.swap_in(request) == 3


def test_what_the_device_still_has_is_not_moved_back() -> None:
    manager = make_manager(num_host_blocks=8)
    request = make_request(range(10))
    swapped(manager, request)
    assert manager.swap_in(request) == 1
    assert request.block_ids[:2] == [1, 2]
    (ops,) = manager.take_block_ops()
    assert ops.swap_in == ((3, request.block_ids[2]),)


def test_host_blocks_in_use_by_a_move_are_not_handed_out() -> None:
    """The content of what came back is read when the step begins: until then nobody else may have the host block."""
    manager = make_manager(num_blocks=4, caching=False, num_host_blocks=3)
    request = make_request(range(10))
    swapped(manager, request)
    assert manager.swap_in(request) == 3
    assert manager.host_pool is not None
    assert manager.host_pool.num_free == 0
    manager.take_block_ops()
    assert manager.host_pool.num_free == 3


def test_freeing_a_swapped_request_frees_the_host() -> None:
    manager = make_manager(caching=False, num_host_blocks=4)
    request = make_request(range(10))
    swapped(manager, request)
    manager.free(request)
    assert manager.host_pool is not None
    assert manager.host_pool.num_free == 4


# The host as a second level of the prefix cache


def evicted(manager: KVCacheManager, tokens: Sequence[int]) -> BlockOps:
    """Compute a prompt, free it, hand all of its blocks out again and give those back; the moves."""
    compute_and_free(manager, make_request(tokens))
    other = make_request([-1] * (manager.pool.num_blocks * BLOCK_SIZE), "other")
    assert manager.allocate(other, other.num_tokens) is not None
    (ops,) = manager.take_block_ops()
    manager.free(other)
    return ops


def test_evicted_blocks_go_to_the_host_and_come_back_on_a_hit() -> None:
    manager = make_manager(num_blocks=4, num_host_blocks=8)
    ops = evicted(manager, range(9))
    assert sorted(device for device, _ in ops.swap_out) == [1, 2]
    request = make_request(range(9), "b")
    hit = manager.lookup(request)
    assert (hit.num_cached_tokens, found(hit), hit.num_from_host) == (8, [NULL_BLOCK, NULL_BLOCK], 2)
    assert manager.allocate(request, 1, hit) == request.block_ids
    (ops,) = manager.take_block_ops()
    assert [device for _, device in ops.swap_in] == request.block_ids[:2]
    assert [host for host, _ in ops.swap_in] == [host for _, host in hit.groups[0].from_host]
    assert found(manager.lookup(make_request(range(9), "c"))) == request.block_ids[:2]


def test_a_block_from_the_host_costs_a_free_block() -> None:
    manager = make_manager(num_blocks=4, num_host_blocks=8)
    evicted(manager, range(9))
    manager.pool.take(2)
    request = make_request(range(9), "b")
    assert not manager.can_allocate(request, 9, manager.lookup(request))


def test_what_is_on_the_host_is_not_saved_twice() -> None:
    manager = make_manager(num_blocks=4, num_host_blocks=8)
    evicted(manager, range(9))
    assert evicted(manager, range(9)).swap_out == ()


def test_a_full_host_saves_nothing() -> None:
    manager = make_manager(num_blocks=4, num_host_blocks=2)
    request = make_request(range(100, 108), "victim")
    swapped(manager, request)
    assert evicted(manager, range(9)).swap_out == ()


def test_forgetting_empties_both_levels() -> None:
    manager = make_manager(num_blocks=4, num_host_blocks=8)
    evicted(manager, range(9))
    manager.forget_all()
    assert num_cached(manager, range(9)) == 0


# Requests that begin alike


def test_a_follower_shares_full_blocks_and_copies_the_last() -> None:
    manager = make_manager(caching=False)
    leader = make_request(range(7))
    compute(manager, leader)
    follower = leader.sibling("b", 1)
    follower.leader, follower.num_computed_tokens = leader, 0
    hit = manager.lookup(follower)
    assert hit == PrefixHit(6, [GroupHit((1,), copy_from=2)])
    assert manager.allocate(follower, 1, hit) == [1, 3]
    assert manager.take_block_ops() == (BlockOps(copy=((2, 3),)),)
    manager.check_integrity([leader, follower])


def test_at_a_blocks_end_nothing_is_copied() -> None:
    manager = make_manager(caching=False)
    leader = make_request(range(9))
    compute(manager, leader)
    follower = leader.sibling("b", 1)
    follower.leader, follower.num_computed_tokens = leader, 0
    assert manager.allocate(follower, 1, manager.lookup(follower)) == [1, 2, 4]
    assert manager.take_block_ops() == (BlockOps(),)


def test_a_leader_without_blocks_has_nothing_to_share() -> None:
    manager = make_manager(caching=False)
    leader = make_request(range(7))
    compute(manager, leader)
    follower = leader.sibling("b", 1)
    follower.leader = leader
    manager.free(leader)
    assert manager.lookup(follower) == NO_HIT


def test_a_leader_whose_window_has_moved_on_has_nothing_to_share() -> None:
    manager = make_windowed(window=4)
    leader = make_request(range(6))
    compute(manager, leader)
    follower = leader.sibling("b", 1)
    follower.leader, follower.num_computed_tokens = leader, 0
    manager.forget_all()
    assert manager.lookup(follower).num_cached_tokens == 5
    leader.token_ids += range(6, 13)
    manager.allocate(leader, 7)
    leader.num_computed_tokens = 13
    manager.allocate(leader, 1)
    assert leader.window_tables[0][:2] == [NULL_BLOCK, NULL_BLOCK]
    assert manager.lookup(follower) == NO_HIT


# Windows


def test_blocks_before_the_window_are_freed_as_it_moves_on() -> None:
    manager = make_windowed(window=4)
    request = make_request(range(12))
    compute(manager, request)
    manager.allocate(request, 1)
    assert request.window_tables[0][:2] == [NULL_BLOCK, NULL_BLOCK]
    assert NULL_BLOCK not in request.block_ids
    manager.check_integrity([request])
    manager.free(request)
    assert [group.pool.num_free for group in manager.groups] == [8, 8]


def test_a_hit_needs_of_a_window_only_what_it_sees() -> None:
    manager = make_windowed(window=4)
    compute_and_free(manager, make_request(range(13)))
    full, windowed = manager.groups
    assert windowed.pool.num_free == 8
    hit = manager.lookup(make_request(range(13), "b"))
    assert hit.num_cached_tokens == 12
    assert found(hit, 1)[:2] == [NULL_BLOCK, NULL_BLOCK]
    assert NULL_BLOCK not in found(hit, 0)
    full.forget_all()
    assert num_cached(manager, range(13)) == 0


def test_a_hit_that_only_a_window_has_on_the_host() -> None:
    """The first group finds its blocks on the device; the second must fetch them."""
    manager = make_windowed(window=4, num_blocks=4, num_host_blocks=8)
    compute_and_free(manager, make_request(range(9)))
    windowed = manager.groups[1]
    windowed.pool.release(windowed.take(4))
    manager.take_block_ops()
    request = make_request(range(9), "b")
    hit = manager.lookup(request)
    assert (hit.num_cached_tokens, len(hit.groups[0].from_host), len(hit.groups[1].from_host)) == (8, 0, 1)
    assert manager.allocate(request, 1, hit) is not None
    assert len(manager.take_block_ops()[1].swap_in) == 1


def test_what_a_window_has_left_behind_is_not_moved() -> None:
    """Else it would come back, be dropped, and be handed out again in the step whose moves write it."""
    manager = make_windowed(window=4, num_host_blocks=8)
    request = make_request(range(12))
    compute(manager, request)
    assert manager.swap_out(request) == 3 + 1
    full, windowed = manager.take_block_ops()
    assert (len(full.swap_out), len(windowed.swap_out)) == (3, 1)
    assert request.host_tables[1][:2] == [NULL_BLOCK, NULL_BLOCK]
    assert manager.swap_in(request) is not None
    assert request.window_tables[0][:2] == [NULL_BLOCK, NULL_BLOCK]


# Beginning with the blocks of a leader


@pytest.mark.parametrize(("num_computed", "num_blocks", "forks"), [(8, 2, True), (7, 2, False), (8, 1, False)])
def test_a_leader_gives_what_it_has_computed_and_not_less(num_computed: int, num_blocks: int, forks: bool) -> None:
    manager = make_manager(caching=False)
    leader = make_request([1] * 12, "leader")
    leader.num_computed_tokens = num_computed
    leader.block_ids = manager.pool.take(num_blocks)
    follower = make_request([1] * 9, "follower")
    follower.leader = leader
    hit = manager.lookup(follower)
    assert hit.num_cached_tokens == (8 if forks else 0)
    if forks:
        assert found(hit) == leader.block_ids


def test_a_table_that_another_group_does_not_share_is_seen() -> None:
    manager = make_windowed(8)
    request = make_request([1] * 6)
    compute(manager, request)
    manager.check_integrity([request])
    request.block_ids += manager.pool.take(1)
    text = f"{request} has tables of 3 and 2 blocks"
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        manager.check_integrity([request])


def test_blocks_that_are_to_stay_free_are_not_given_after_a_hit_either() -> None:
    manager = make_manager(num_blocks=6)
    compute_and_free(manager, make_request(range(9)))
    request = make_request(range(12))
    hit = manager.lookup(request)
    assert manager.allocate(request, 4, hit, keep_free=4) is None
    assert request.block_ids == []
    assert manager.allocate(request, 4, hit, keep_free=3) is not None


def test_any_text_is_a_salt() -> None:
    """A lone surrogate is no Unicode, but JSON may have it."""
    manager = make_manager()
    compute_and_free(manager, make_request(range(9), salt="\ud800"))
    assert num_cached(manager, range(9), salt="\ud800") == 8
    assert num_cached(manager, range(9), salt="\ud801") == 0


# Limits of one and of several groups


def test_how_many_sequences_fit_at_all() -> None:
    manager = make_manager(num_blocks=8)
    assert [manager.fits_at_all(num_tokens) for num_tokens in (32, 33)] == [True, False]
    assert [manager.fits_at_all(32, reserved=reserved) for reserved in (0, 1)] == [True, False]
    assert [manager.fits_at_all(20, num_sequences=2, num_shared=shared) for shared in (2, 1)] == [True, False]


def test_what_is_held_already_is_not_needed() -> None:
    manager = make_manager()
    request = make_request([1] * 8)
    compute(manager, request)
    assert [manager.num_needed(request, num_tokens, NO_HIT) for num_tokens in (4, 8, 9)] == [0, 0, 1]


def test_who_needs_no_block_is_not_refused_for_the_sake_of_others() -> None:
    manager = make_manager(num_blocks=2)
    request = make_request([1] * 6)
    compute(manager, request)
    assert manager.allocate(request, 2, keep_free=1) == []
    assert manager.allocate(request, 3, keep_free=1) is None


def test_three_groups_have_three_tables() -> None:
    groups = [BlockGroup(16, BLOCK_SIZE, window=window, most_tokens=64) for window in (None, 4, 8)]
    manager = KVCacheManager(groups, hash_seed=0)
    request = make_request([1] * 17)
    manager.allocate(request, 16)
    request.num_computed_tokens = 16
    manager.allocate(request, 1)
    tables = (request.block_ids, *request.window_tables)
    assert [sum(block != NULL_BLOCK for block in table) for table in tables] == [5, 2, 3]
