"""Prefix lookup, allocation, publication and freeing of block tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from isthmus.sampling_params import SamplingParams
from isthmus.scheduler.block_pool import BlockPool
from isthmus.scheduler.kv_cache_manager import NO_HIT, KVCacheManager, PrefixHit
from isthmus.scheduler.output import BlockOps
from isthmus.scheduler.request import Request

BLOCK_SIZE = 4


def make_manager(num_blocks: int = 8, block_size: int = BLOCK_SIZE, *, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_blocks), block_size, enable_prefix_caching=caching, hash_seed=0)


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
    assert hit == PrefixHit(tuple(first[: expected // 16]), expected)


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

    fixed, random = hashes(make_manager()), [hashes(KVCacheManager(BlockPool(8), BLOCK_SIZE)) for _ in range(2)]
    assert fixed == hashes(make_manager())
    assert len(fixed) == len(set(fixed)) == 2
    assert random[0] != random[1]


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
    assert hit.block_ids == (1, 2)
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
    assert hit.block_ids == (1,)
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
    assert manager.lookup(make_request(range(9), "c")).block_ids == (1, 2)


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


def test_nothing_is_copied_yet() -> None:
    assert make_manager().take_block_ops() == BlockOps()
