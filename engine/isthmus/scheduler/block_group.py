"""The blocks of one group of layers: layers that see all of a sequence, or those that see a window of it.

Every group has pools and tables of its own. A request's tables have the same length in every group; where a window has
moved on, the entry is the null block and the block is free.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from isthmus.scheduler.block_lives import BlockLives
from isthmus.scheduler.block_pool import NULL_BLOCK, BlockPool
from isthmus.scheduler.output import NO_BLOCK_OPS, BlockOps


class BlockGroup:
    """`window`: tokens that a query of these layers sees, itself included; None = all. `most_tokens`: that a request
    computes in one step.

    The host pool holds the blocks of swapped requests, and as a second-level prefix cache the content of hashed blocks
    that the device handed out again. A step's moves are collected and taken once, by `take_block_ops`; until then host
    blocks that take part in one are pinned, so that none is both source and target, or a target twice.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        window: int | None = None,
        most_tokens: int = 1,
        saves_evicted: bool = True,
        lives: BlockLives | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks, lives)
        self.host_pool = BlockPool(num_host_blocks) if num_host_blocks else None
        self.block_size = block_size
        self.window = window
        self._most_tokens = most_tokens
        self._saves_evicted = saves_evicted and self.host_pool is not None
        self._swap_out: list[tuple[int, int]] = []
        self._swap_in: list[tuple[int, int]] = []
        self._copy: list[tuple[int, int]] = []
        self._pinned: list[int] = []

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` tokens holds at most at any time."""
        blocks = -(-num_tokens // self.block_size)
        if self.window is None:
            return blocks
        return min(blocks, window_blocks(self.window, self._most_tokens, self.block_size))

    @property
    def longest(self) -> float:
        """Tokens of the longest sequence that the empty pool holds: infinitely many if it holds a whole window."""
        if self.window is not None and self.pool.num_blocks >= window_blocks(
            self.window, self._most_tokens, self.block_size
        ):
            return math.inf
        return self.pool.num_blocks * self.block_size

    def first_visible(self, num_computed_tokens: int) -> int:
        """Index in a table of the first block that the next token still sees."""
        if self.window is None:
            return 0
        return max(num_computed_tokens - self.window + 1, 0) // self.block_size

    def usable_hit(self, hashes: Sequence[bytes], count: int) -> int:
        """The largest number of the first `count` blocks after which this group could go on: all that the next token
        sees are on the device or on the host.
        """
        if self.window is None:
            return next((index for index in range(count) if not self._has(hashes[index])), count)
        end, index = count, count - 1
        while end and index >= self.first_visible(end * self.block_size):
            if not self._has(hashes[index]):
                end = index
            index -= 1
        return end

    def _has(self, block_hash: bytes) -> bool:
        return self.pool.find(block_hash) is not None or (
            self.host_pool is not None and self.host_pool.find(block_hash) is not None
        )

    def hit(self, hashes: Sequence[bytes], count: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Table of the first `count` blocks, and (index, host block) of those that are only on the host."""
        table: list[int] = []
        from_host: list[tuple[int, int]] = []
        first = self.first_visible(count * self.block_size)
        for index in range(count):
            block_id = self.pool.find(hashes[index]) if index >= first else NULL_BLOCK
            if block_id is None:
                block_id = NULL_BLOCK
                on_host = None if self.host_pool is None else self.host_pool.find(hashes[index])
                assert on_host is not None, "usable_hit found it"
                from_host.append((index, on_host))
            table.append(block_id)
        return table, from_host

    def num_revived(self, table: Iterable[int]) -> int:
        """Blocks of `table` that are free now, so that sharing them takes them from the free ones."""
        return sum(self.pool.is_free(block_id) for block_id in table if block_id != NULL_BLOCK)

    def share(self, table: Iterable[int]) -> None:
        """One more reference to each block of the table."""
        for block_id in table:
            if block_id != NULL_BLOCK:
                self.pool.share(block_id)

    def take(self, count: int) -> list[int]:
        """Fresh blocks; the content that they lose goes to the host, if there is room and it is not there."""
        if self._saves_evicted:
            for block_id, block_hash in self.pool.next_to_lose(count):
                self._save(block_id, block_hash)
        return self.pool.take(count)

    def _save(self, block_id: int, block_hash: bytes) -> None:
        host = self.host_pool
        if host is None or host.find(block_hash) is not None or not host.num_free:
            return
        (host_id,) = host.take(1)
        host.publish(host_id, block_hash)
        self._pinned.append(host_id)
        self._swap_out.append((block_id, host_id))

    def pin(self, host_id: int) -> None:
        """Keep a host block until the step's moves are taken."""
        assert self.host_pool is not None
        self.host_pool.share(host_id)
        self._pinned.append(host_id)

    def bring(self, host_id: int) -> int:
        """A fresh block that gets the content of a pinned host block."""
        (block_id,) = self.take(1)
        self._swap_in.append((host_id, block_id))
        return block_id

    def copy(self, source: int, target: int) -> None:
        """Copy a block before the next forward."""
        self._copy.append((source, target))

    def move_to_host(self, table: Sequence[int]) -> list[int]:
        """Host blocks that get the content of `table`, null where that is null. There must be room."""
        assert self.host_pool is not None
        host_ids = iter(self.host_pool.take(num_held(table)))
        host_table = [NULL_BLOCK if block_id == NULL_BLOCK else next(host_ids) for block_id in table]
        self._swap_out += [pair for pair in zip(table, host_table, strict=True) if pair[0] != NULL_BLOCK]
        return host_table

    def release(self, table: list[int]) -> None:
        """Give the table back, tail first: of one sequence the shared beginning stays longest in the LRU."""
        self.pool.release(block_id for block_id in reversed(table) if block_id != NULL_BLOCK)
        table.clear()

    def release_host(self, host_table: list[int]) -> None:
        """The same on the host."""
        if self.host_pool is not None:
            self.host_pool.release(block_id for block_id in reversed(host_table) if block_id != NULL_BLOCK)
        host_table.clear()

    def drop_unseen(self, table: list[int], num_computed_tokens: int) -> None:
        """Free the blocks before the window. Those before them are null already."""
        index = min(self.first_visible(num_computed_tokens), len(table)) - 1
        unseen: list[int] = []
        while index >= 0 and table[index] != NULL_BLOCK:
            unseen.append(table[index])
            table[index] = NULL_BLOCK
            index -= 1
        self.pool.release(unseen)

    def take_block_ops(self) -> BlockOps:
        """What the worker must move before the next forward."""
        if not (self._swap_out or self._swap_in or self._copy):
            return NO_BLOCK_OPS
        ops = BlockOps(tuple(self._swap_out), tuple(self._swap_in), tuple(self._copy))
        self._swap_out, self._swap_in, self._copy = [], [], []
        if self._pinned and self.host_pool is not None:
            self.host_pool.release(self._pinned)
            self._pinned = []
        return ops

    def forget_all(self) -> None:
        """Drop every hash of both pools."""
        self.pool.forget_all()
        if self.host_pool is not None:
            self.host_pool.forget_all()

    def check_integrity(self, tables: Iterable[Sequence[int]], host_tables: Iterable[Sequence[int]]) -> None:
        """Raises RuntimeError if the pools and the tables disagree. Between steps only: no moves may be pending."""
        self.pool.check_integrity(Counter(b for table in tables for b in table if b != NULL_BLOCK))
        if self.host_pool is not None:
            self.host_pool.check_integrity(Counter(b for table in host_tables for b in table if b != NULL_BLOCK))


def window_blocks(window: int, most_tokens: int, block_size: int) -> int:
    """Blocks that a sequence holds at most: the window before the first token of a step, and the step's own tokens; one
    more because blocks begin where they do.
    """
    return -(-(window - 1 + most_tokens) // block_size) + 1


def num_held(table: Iterable[int]) -> int:
    """Blocks of a table that are not null."""
    return sum(block_id != NULL_BLOCK for block_id in table)
