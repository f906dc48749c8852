"""How long cached content lives: counted when a block is handed out again."""

from __future__ import annotations

import pytest

from isthmus.scheduler.block_lives import BlockLives
from isthmus.scheduler.block_pool import BlockPool
from isthmus.scheduler.stats import SchedulerStats


def lost(stats: SchedulerStats) -> tuple[int, int, float, float]:
    return (
        stats.num_lost_blocks,
        stats.num_unused_lost_blocks,
        stats.lost_block_lifetime_s,
        stats.lost_block_idle_s,
    )


class Followed:
    def __init__(self, num_blocks: int) -> None:
        self.stats = SchedulerStats()
        self.lives = BlockLives(num_blocks, self.stats)
        self.pool = BlockPool(num_blocks, self.lives)

    def at(self, now_s: float) -> BlockPool:
        self.lives.now_s = now_s
        return self.pool


def test_from_filled_to_handed_out_again() -> None:
    followed = Followed(1)
    (block,) = followed.at(1.0).take(1)
    followed.at(2.0).publish(block, b"a")
    followed.at(5.0).release([block])
    assert lost(followed.stats) == (0, 0, 0.0, 0.0)
    followed.at(9.0).take(1)
    assert lost(followed.stats) == (1, 1, 7.0, 4.0)


def test_content_that_a_later_request_found() -> None:
    followed = Followed(1)
    (block,) = followed.at(0.0).take(1)
    followed.at(0.0).publish(block, b"a")
    followed.at(1.0).release([block])
    followed.at(2.0).share(block)
    followed.at(6.0).release([block])
    followed.at(7.0).take(1)
    assert lost(followed.stats) == (1, 0, 7.0, 1.0)


def test_the_next_content_starts_anew() -> None:
    followed = Followed(1)
    for start_s, found in ((0.0, True), (10.0, False)):
        (block,) = followed.at(start_s).take(1)
        followed.at(start_s).publish(block, str(start_s).encode())
        if found:
            followed.pool.share(block)
            followed.pool.release([block])
        followed.at(start_s + 1).release([block])
    followed.at(12.0).take(1)
    assert lost(followed.stats) == (2, 1, 10.0 + 2.0, 9.0 + 1.0)


def test_blocks_without_a_name_have_no_content_to_lose() -> None:
    followed = Followed(2)
    blocks = followed.at(0.0).take(2)
    followed.pool.publish(blocks[0], b"same")
    followed.pool.publish(blocks[1], b"same")
    followed.pool.share(blocks[1])
    followed.pool.release([*blocks, blocks[1]])
    followed.at(3.0).take(2)
    assert lost(followed.stats) == (1, 1, 3.0, 3.0)


@pytest.mark.parametrize("count", [1, 3])
def test_what_is_forgotten_at_once_is_not_lost_to_anybody(count: int) -> None:
    followed = Followed(3)
    blocks = followed.at(0.0).take(count)
    for block in blocks:
        followed.pool.publish(block, bytes([block]))
    followed.pool.release(blocks)
    followed.pool.forget_all()
    followed.at(1.0).take(3)
    assert lost(followed.stats) == (0, 0, 0.0, 0.0)


def test_every_loss_is_added_to_the_totals() -> None:
    followed = Followed(2)
    for start_s in (0.0, 10.0):
        blocks = followed.at(start_s).take(2)
        for block in blocks:
            followed.pool.publish(block, f"{start_s} {block}".encode())
        followed.at(start_s + 1).release(blocks)
    followed.at(20.0).take(2)
    assert lost(followed.stats) == (4, 4, 2 * 10.0 + 2 * 10.0, 2 * 9.0 + 2 * 9.0)


def test_how_long_content_lay_until_it_was_found_again() -> None:
    followed = Followed(1)
    (block,) = followed.at(0.0).take(1)
    followed.at(1.0).publish(block, b"a")
    followed.at(2.0).share(block)  # somebody holds it: there is no gap
    followed.at(3.0).release([block, block])
    followed.at(7.0).share(block)
    followed.at(9.0).share(block)
    assert (followed.stats.num_reused_blocks, followed.stats.reused_block_gap_s) == (1, 4.0)
    followed.at(10.0).release([block, block])
    followed.at(10.5).share(block)
    assert (followed.stats.num_reused_blocks, followed.stats.reused_block_gap_s) == (2, 4.5)
