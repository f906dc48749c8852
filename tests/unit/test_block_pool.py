"""The free list's order, references and the hash index."""

from __future__ import annotations

import re

import pytest

from isthmus.scheduler.block_pool import NULL_BLOCK, BlockPool


def in_order_of_reuse(pool: BlockPool) -> list[int]:
    return pool.take(pool.num_free)


def published(pool: BlockPool, count: int) -> list[int]:
    """Take `count` blocks and give block i the hash b"i"."""
    block_ids = pool.take(count)
    for block_id in block_ids:
        pool.publish(block_id, name(block_id))
    return block_ids


def name(block_id: int) -> bytes:
    return str(block_id).encode()


def test_the_null_block_is_never_handed_out() -> None:
    assert NULL_BLOCK == 0
    assert in_order_of_reuse(BlockPool(3)) == [1, 2, 3]


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("num_blocks=0: a pool needs at least one usable block")):
        BlockPool(0)


def test_taking_more_than_is_free_takes_nothing() -> None:
    pool = BlockPool(3)
    pool.take(2)
    with pytest.raises(ValueError, match=re.escape("asked for 2 blocks, 1 are free")):
        pool.take(2)
    assert (pool.num_free, pool.num_used) == (1, 2)


def test_releasing_twice_is_an_error() -> None:
    pool = BlockPool(3)
    pool.take(1)
    pool.release([1])
    with pytest.raises(ValueError, match=re.escape("block 1 is released more often than it was taken")):
        pool.release([1])


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    pool.take(1)
    pool.share(1)
    pool.release([1])
    assert not pool.is_free(1)
    pool.release([1])
    assert pool.is_free(1)
    assert pool.num_free == 2


def test_hashed_blocks_are_reused_in_the_order_of_their_release() -> None:
    pool = BlockPool(3)
    published(pool, 3)
    pool.release([2, 3, 1])
    assert in_order_of_reuse(pool) == [2, 3, 1]


def test_blocks_without_a_hash_are_reused_first() -> None:
    pool = BlockPool(4)
    pool.take(4)
    pool.publish(1, b"one")
    pool.publish(3, b"three")
    pool.release([1, 2, 3, 4])
    assert in_order_of_reuse(pool) == [4, 2, 1, 3]


def test_a_free_block_keeps_its_hash_until_it_is_handed_out() -> None:
    pool = BlockPool(2)
    published(pool, 2)
    pool.release([1, 2])
    assert pool.find(name(1)) == 1
    assert pool.take(1) == [1]
    assert pool.find(name(1)) is None
    assert pool.find(name(2)) == 2


def test_sharing_a_free_block_takes_it_off_the_free_list() -> None:
    pool = BlockPool(3)
    published(pool, 2)
    pool.release([1, 2])
    pool.share(1)
    assert pool.num_free == 2
    assert in_order_of_reuse(pool) == [3, 2]
    assert pool.find(name(1)) == 1


def test_sharing_renews_a_blocks_place_in_the_order() -> None:
    pool = BlockPool(2)
    published(pool, 2)
    pool.release([1, 2])
    pool.share(1)
    pool.release([1])
    assert in_order_of_reuse(pool) == [2, 1]


def test_the_first_block_with_a_content_represents_it() -> None:
    pool = BlockPool(2)
    pool.take(2)
    pool.publish(1, b"same")
    pool.publish(2, b"same")
    assert pool.find(b"same") == 1
    pool.release([1, 2])
    assert in_order_of_reuse(pool) == [2, 1]
    assert pool.find(b"same") is None


def test_a_block_keeps_the_hash_it_has() -> None:
    pool = BlockPool(1)
    pool.take(1)
    pool.publish(1, b"first")
    pool.publish(1, b"second")
    assert pool.find(b"first") == 1
    assert pool.find(b"second") is None


def test_what_is_handed_out_next_is_known_beforehand() -> None:
    pool = BlockPool(4)
    published(pool, 3)
    pool.release([2, 3, 1])
    assert list(pool.next_to_lose(3)) == [(2, name(2)), (3, name(3))]
    assert pool.take(3) == [4, 2, 3]
    assert list(pool.next_to_lose(9)) == [(1, name(1))]


def test_references_are_counted() -> None:
    pool = BlockPool(2)
    pool.take(1)
    pool.share(1)
    assert [pool.num_references(block_id) for block_id in (1, 2)] == [2, 0]


def test_forget_all_keeps_blocks_and_references() -> None:
    pool = BlockPool(3)
    published(pool, 2)
    pool.release([2])
    pool.forget_all()
    assert pool.find(name(1)) is None
    assert pool.find(name(2)) is None
    assert (pool.is_free(1), pool.is_free(2)) == (False, True)
    pool.check_integrity({1: 1})
    published(pool, 2)
    assert pool.find(name(3)) == 3


@pytest.mark.parametrize(
    ("references", "fault"),
    [
        ({1: 1, 2: 2, 3: 1}, "block 3 has 0 references, tables hold 1"),
        ({2: 2}, "block 1 has 1 references, tables hold 0"),
        ({1: 1, 2: 1}, "block 2 has 2 references, tables hold 1"),
        ({0: 1, 1: 1, 2: 2}, "the null block is in a table or on the free list"),
    ],
)
def test_integrity_names_the_block_that_tables_disagree_about(references: dict[int, int], fault: str) -> None:
    pool = BlockPool(3)
    pool.take(2)
    pool.share(2)
    pool.check_integrity({1: 1, 2: 2})
    with pytest.raises(RuntimeError, match=f"^{re.escape(fault)}$"):
        pool.check_integrity(references)


def test_integrity_sees_a_used_block_on_the_free_list() -> None:
    pool = BlockPool(2)
    pool.take(1)
    pool._free[1] = None
    with pytest.raises(RuntimeError, match=r"^block 1 has 1 references and is on the free list$"):
        pool.check_integrity({1: 1})


def test_integrity_sees_a_lost_block() -> None:
    pool = BlockPool(2)
    del pool._free[2]
    with pytest.raises(RuntimeError, match=r"^block 2 has 0 references and is not on the free list$"):
        pool.check_integrity({})


def test_integrity_sees_a_hash_without_its_block() -> None:
    pool = BlockPool(2)
    published(pool, 1)
    pool._hash_of[1] = None
    with pytest.raises(RuntimeError, match=r"^1 indexed hashes, 0 hashed blocks$"):
        pool.check_integrity({1: 1})


def test_integrity_sees_a_hash_at_the_wrong_block() -> None:
    pool = BlockPool(2)
    published(pool, 2)
    pool._by_hash[name(1)] = 2
    with pytest.raises(RuntimeError, match=r"^the index maps a hash to block 2, which does not have it$"):
        pool.check_integrity({1: 1, 2: 1})
