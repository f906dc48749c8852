"""Reference-counted blocks, a free list in LRU order, and an index by content hash. Every operation is O(1).

Block 0 is the null block: never handed out, always valid memory, the filler of block tables. `num_blocks` counts the
usable ones, ids 1..num_blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.scheduler.block_lives import BlockLives

NULL_BLOCK = 0


class BlockPool:
    """A free block keeps its hash until it is handed out again: the free list *is* the prefix cache.

    Invariants: a block is free exactly when its reference count is 0; `_by_hash[h] == b` exactly when
    `_hash_of[b] == h`. `lives`: follows what becomes of the contents, if somebody wants to know.
    """

    def __init__(self, num_blocks: int, lives: BlockLives | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: a pool needs at least one usable block")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * (num_blocks + 1)
        self._hash_of: list[bytes | None] = [None] * (num_blocks + 1)
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._lives = lives

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def is_free(self, block_id: int) -> bool:
        """Whether nobody holds the block. It may still be found by its hash."""
        return self._ref_counts[block_id] == 0

    def num_references(self, block_id: int) -> int:
        """How many tables hold the block."""
        return self._ref_counts[block_id]

    def next_to_lose(self, count: int) -> Iterator[tuple[int, bytes]]:
        """(block, hash) of those among the next `count` blocks to be handed out whose content can be found now."""
        for block_id in islice(self._free, count):
            block_hash = self._hash_of[block_id]
            if block_hash is not None:
                yield block_id, block_hash

    def take(self, count: int) -> list[int]:
        """`count` blocks with one reference each, least recently used first; their old hashes are forgotten.

        Raises ValueError if fewer are free: callers must have checked `num_free`.
        """
        if count > len(self._free):
            raise ValueError(f"asked for {count} blocks, {len(self._free)} are free")
        taken = []
        for _ in range(count):
            block_id, _none = self._free.popitem(last=False)
            self._forget(block_id)
            self._ref_counts[block_id] = 1
            taken.append(block_id)
        return taken

    def share(self, block_id: int) -> None:
        """One more reference; takes the block off the free list if it was there."""
        if self._ref_counts[block_id] == 0:
            del self._free[block_id]
        self._ref_counts[block_id] += 1
        if self._lives is not None and self._hash_of[block_id] is not None:
            self._lives.found(block_id)

    def release(self, block_ids: Iterable[int]) -> None:
        """One reference less each. Freed blocks queue up in the order given: hashed ones at the end, to live longest;
        ones without a hash at the front, to be reused at once.
        """
        for block_id in block_ids:
            count = self._ref_counts[block_id] - 1
            if count < 0:
                raise ValueError(f"block {block_id} is released more often than it was taken")
            self._ref_counts[block_id] = count
            if count == 0:
                self._free[block_id] = None
                if self._hash_of[block_id] is None:
                    self._free.move_to_end(block_id, last=False)
                elif self._lives is not None:
                    self._lives.left(block_id)

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Make a full block findable. The first block with a content stays its representative."""
        if block_hash not in self._by_hash and self._hash_of[block_id] is None:
            self._hash_of[block_id] = block_hash
            self._by_hash[block_hash] = block_id
            if self._lives is not None:
                self._lives.filled(block_id)

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, free or in use."""
        return self._by_hash.get(block_hash)

    def forget_all(self) -> None:
        """Drop every hash; blocks and references stay."""
        self._by_hash.clear()
        self._hash_of = [None] * (self.num_blocks + 1)

    def _forget(self, block_id: int) -> None:
        block_hash = self._hash_of[block_id]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hash_of[block_id] = None
            if self._lives is not None:
                self._lives.lost(block_id)

    def check_integrity(self, references: Mapping[int, int]) -> None:
        """Compare with `references`, block id -> tables that hold it. Raises RuntimeError with the first fault."""
        for block_id in range(1, self.num_blocks + 1):
            count = self._ref_counts[block_id]
            if count != references.get(block_id, 0):
                raise RuntimeError(
                    f"block {block_id} has {count} references, tables hold {references.get(block_id, 0)}"
                )
            if (count == 0) != (block_id in self._free):
                raise RuntimeError(
                    f"block {block_id} has {count} references and is{' ' if count else ' not '}on the free list"
                )
        if NULL_BLOCK in references or NULL_BLOCK in self._free:
            raise RuntimeError("the null block is in a table or on the free list")
        if len(self._by_hash) != sum(h is not None for h in self._hash_of):
            raise RuntimeError(
                f"{len(self._by_hash)} indexed hashes, {sum(h is not None for h in self._hash_of)} hashed blocks"
            )
        for block_hash, block_id in self._by_hash.items():
            if self._hash_of[block_id] != block_hash:
                raise RuntimeError(f"the index maps a hash to block {block_id}, which does not have it")
