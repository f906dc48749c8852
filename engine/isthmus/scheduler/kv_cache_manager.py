"""Which blocks a request holds: prefix lookup, allocation, publication, swaps, freeing. Ids only, never memory."""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from isthmus.scheduler.block_group import BlockGroup, num_held
from isthmus.scheduler.block_pool import NULL_BLOCK, BlockPool
from isthmus.scheduler.output import BlockOps
from isthmus.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class GroupHit:
    """One group's part of a hit. block_ids: the beginning of the table, the null block where the content is on the
    host or outside the window.  from_host: (index, host block).  copy_from: the block that holds the tokens after
    those, to be copied before it is written to.
    """

    block_ids: Sequence[int]
    from_host: Sequence[tuple[int, int]] = ()
    copy_from: int | None = None


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A request's beginning that is in a cache already: the tokens that it holds, and the blocks of each group."""

    num_cached_tokens: int = 0
    groups: Sequence[GroupHit] = ()

    @property
    def num_blocks(self) -> int:
        """Entries of a table that the hit fills."""
        return len(self.groups[0].block_ids) if self.groups else 0

    @property
    def num_from_host(self) -> int:
        """Blocks that come from the host, of the first group."""
        return len(self.groups[0].from_host) if self.groups else 0


NO_HIT = PrefixHit()
NO_BLOCKS: list[int] = []
"""What an allocation returns that needed none. Never changed by anyone."""


class KVCacheManager:
    """Block tables of one or several groups of layers.

    Hashes: sha256 over (parent hash, extra keys, token ids), chained from a per-engine seed, so that equal hashes
    mean equal prefixes and nobody outside can construct a collision.
    """

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        *,
        enable_prefix_caching: bool = True,
        hash_seed: int | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = groups[0].block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._has_windows = any(group.window is not None for group in groups)
        seed = secrets.token_bytes(32) if hash_seed is None else str(hash_seed).encode()
        self._root_hash = hashlib.sha256(b"isthmus-prefix\0" + seed).digest()

    @property
    def pool(self) -> BlockPool:
        """The first group's, which is the one that settings and statistics speak of."""
        return self.groups[0].pool

    @property
    def host_pool(self) -> BlockPool | None:
        """The first group's."""
        return self.groups[0].host_pool

    def num_blocks_for(self, num_tokens: int) -> int:
        """Entries of a table that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def reads_cache(self, request: Request) -> bool:
        """Whether the request may use cached blocks. They have neither logits nor hidden states."""
        return self.enable_prefix_caching and not request.needs_all_tokens

    # Beginnings that are there already.

    def lookup(self, request: Request) -> PrefixHit:
        """The longest cached prefix, at most num_tokens - 1 tokens: the last one must run to give logits."""
        if request.leader is not None and self._can_fork(request.leader, request):
            return self.fork(request.leader, request.num_tokens - 1)
        if not self.reads_cache(request):
            return NO_HIT
        count = (request.num_tokens - 1) // self.block_size
        hashes = self._hashes(request, count)
        before = -1
        while count != before:
            before = count
            for group in self.groups:
                count = group.usable_hit(hashes, count)
        if not count:
            return NO_HIT
        parts = [GroupHit(*group.hit(hashes, count)) for group in self.groups]
        return PrefixHit(count * self.block_size, parts)

    def _can_fork(self, leader: Request, request: Request) -> bool:
        num_tokens = request.num_tokens - 1
        if not len(leader.block_ids) * self.block_size >= num_tokens <= leader.num_computed_tokens:
            return False
        end = self.num_blocks_for(num_tokens)
        # A window of the leader's may have moved on since.
        return all(
            NULL_BLOCK not in self._table(leader, index)[group.first_visible(num_tokens) : end]
            for index, group in enumerate(self.groups)
        )

    def fork(self, leader: Request, num_tokens: int) -> PrefixHit:
        """The blocks of `leader` that hold `num_tokens` tokens: full ones shared, a last partial one copied. Its own
        table may differ from there on, since it is never written below `num_tokens`.
        """
        full, rest = divmod(num_tokens, self.block_size)
        tables = [self._table(leader, index) for index in range(len(self.groups))]
        return PrefixHit(
            num_tokens,
            [GroupHit(tuple(table[:full]), copy_from=table[full] if rest else None) for table in tables],
        )

    # Growing.

    def can_allocate(
        self,
        request: Request,
        num_tokens: int,
        hit: PrefixHit,
        *,
        keep_free: int = 0,
        leaving: Sequence[Request] = (),
    ) -> bool:
        """Whether the table may grow to `num_tokens` tokens, beginning with `hit`, leaving `keep_free` blocks of the
        first group, once the requests of `leaving` are gone.
        """
        for index, group in enumerate(self.groups):
            needed = self.num_needed(request, num_tokens, hit, index)
            free = group.pool.num_free - (keep_free if index == 0 else 0)
            if needed > free + (self._num_freed(index, leaving) if leaving else 0):
                return False
        return True

    def num_needed(self, request: Request, num_tokens: int, hit: PrefixHit, index: int = 0) -> int:
        """Free blocks of a group that growing the table to `num_tokens` tokens, beginning with `hit`, may take."""
        group = self.groups[index]
        needed = group.most_blocks(num_tokens) - num_held(self._table(request, index))
        if hit.groups:
            table = hit.groups[index].block_ids
            needed += group.num_revived(table) - num_held(table)
        return max(needed, 0)

    def fits_at_all(self, num_tokens: int, *, reserved: int = 0, num_sequences: int = 1, num_shared: int = 0) -> bool:
        """Whether empty pools could hold so many sequences of so many tokens, which share their first `num_shared`
        blocks, without `reserved` blocks of the first group.
        """
        apart = num_shared + num_sequences * (self.num_blocks_for(num_tokens) - num_shared)
        return all(
            min(num_sequences * group.most_blocks(num_tokens), apart)
            <= group.pool.num_blocks - (reserved if index == 0 else 0)
            for index, group in enumerate(self.groups)
        )

    @property
    def longest(self) -> float:
        """Tokens of the longest sequence that empty pools hold; infinitely many if no layer sees all of it."""
        return min(group.longest for group in self.groups)

    def allocate(
        self, request: Request, num_new_tokens: int, hit: PrefixHit = NO_HIT, *, keep_free: int = 0
    ) -> list[int] | None:
        """Grow the tables to hold computed (+ hit) + new tokens; all or nothing. Blocks before a window are freed.

        Returns the blocks added to the first group's table (the hit's first, [] if it was long enough), None if too
        few are free.
        """
        if hit.num_cached_tokens:
            return self._allocate_after(request, num_new_tokens, hit, keep_free)
        missing = -(-(request.num_computed_tokens + num_new_tokens) // self.block_size) - len(request.block_ids)
        if self._has_windows:
            self._drop_unseen(request)
        if missing <= 0:
            return NO_BLOCKS
        for index, group in enumerate(self.groups):
            if missing + (keep_free if index == 0 else 0) > group.pool.num_free:
                return None
        added = self.groups[0].take(missing)
        request.block_ids.extend(added)
        for table, group in zip(request.window_tables, self.groups[1:], strict=True):
            table.extend(group.take(missing))
        return added

    def _drop_unseen(self, request: Request) -> None:
        for index, group in enumerate(self.groups):
            if group.window is not None:
                group.drop_unseen(self._table(request, index), request.num_computed_tokens)

    def _allocate_after(
        self, request: Request, num_new_tokens: int, hit: PrefixHit, keep_free: int
    ) -> list[int] | None:
        total = request.num_computed_tokens + hit.num_cached_tokens + num_new_tokens
        if not self.can_allocate(request, total, hit, keep_free=keep_free):
            return None
        self._open_tables(request)
        hashes = self._hashes(request, hit.num_blocks) if any(part.from_host for part in hit.groups) else []
        for index, (group, part) in enumerate(zip(self.groups, hit.groups, strict=True)):
            table = self._table(request, index)
            # Whatever the hit is made of must be held before anything is taken, or it might be taken itself.
            group.share(part.block_ids)
            for _, host_id in part.from_host:
                group.pin(host_id)
            table.extend(part.block_ids)
            for place, host_id in part.from_host:
                table[place] = group.bring(host_id)
                group.pool.publish(table[place], hashes[place])
            fresh = group.take(max(self.num_blocks_for(total) - len(table), 0))
            if part.copy_from is not None:
                group.copy(part.copy_from, fresh[0])
            table.extend(fresh)
        request.num_published_blocks = max(request.num_published_blocks, hit.num_blocks)
        return request.block_ids.copy()

    def publish(self, request: Request, num_valid_tokens: int) -> None:
        """Index the blocks that the first `num_valid_tokens` tokens fill. Placeholders must not be counted in."""
        full = num_valid_tokens // self.block_size
        if full <= request.num_published_blocks or not self.enable_prefix_caching:
            return
        hashes = self._hashes(request, full)
        for number, group in enumerate(self.groups):
            table = self._table(request, number)
            for index in range(request.num_published_blocks, full):
                if table[index] != NULL_BLOCK:
                    group.pool.publish(table[index], hashes[index])
        request.num_published_blocks = full

    # To the host and back.

    def swap_out(self, request: Request) -> int | None:
        """Move the request's computed blocks to the host and free its device blocks; the number moved.

        None, and nothing done, if the host has no room.
        """
        self._drop_unseen(request)
        count = self.num_blocks_for(request.num_computed_tokens)
        tables = [self._table(request, index)[:count] for index in range(len(self.groups))]
        for group, table in zip(self.groups, tables, strict=True):
            if group.host_pool is None or num_held(table) > group.host_pool.num_free:
                return None
        request.host_tables = [g.move_to_host(table) for g, table in zip(self.groups, tables, strict=True)]
        self._free_device(request)
        return sum(map(num_held, tables))

    def swap_in(self, request: Request, *, keep_free: int = 0) -> int | None:
        """Bring a swapped request's blocks back, if the device has room for its whole sequence; the number moved.

        Blocks whose content the device still has are shared instead. None, and nothing done, without room.
        """
        hit = self._still_on_device(request)
        if not self.can_allocate(request, request.num_tokens, hit, keep_free=keep_free):
            return None
        self._open_tables(request)
        num_moved = 0
        for index, (group, part) in enumerate(zip(self.groups, hit.groups, strict=True)):
            table, host_table = self._table(request, index), request.host_tables[index]
            group.share(part.block_ids)
            for found, host_id in zip(part.block_ids, host_table, strict=True):
                if found == NULL_BLOCK and host_id != NULL_BLOCK:
                    group.pin(host_id)
                    table.append(group.bring(host_id))
                    num_moved += 1
                else:
                    table.append(found)
            group.release_host(host_table)
        request.host_tables = []
        return num_moved

    def _still_on_device(self, request: Request) -> PrefixHit:
        """Of what was moved to the host, the full blocks that the device has under their hash; null for the rest."""
        full = request.num_computed_tokens // self.block_size if self.enable_prefix_caching else 0
        hashes = self._hashes(request, full) if full else []
        parts = []
        for group, host_table in zip(self.groups, request.host_tables, strict=True):
            found = [
                group.pool.find(hashes[index]) or NULL_BLOCK if index < full and host_id != NULL_BLOCK else NULL_BLOCK
                for index, host_id in enumerate(host_table)
            ]
            parts.append(GroupHit(found))
        return PrefixHit(0, parts)

    # Giving back.

    def free(self, request: Request) -> None:
        """Give everything back, on the device and on the host."""
        self._free_device(request)
        for group, host_table in zip(self.groups, request.host_tables, strict=False):
            group.release_host(host_table)
        request.host_tables = []

    def _free_device(self, request: Request) -> None:
        for index, group in enumerate(self.groups):
            group.release(self._table(request, index))
        request.num_published_blocks = 0

    def _num_freed(self, index: int, requests: Iterable[Request]) -> int:
        """Blocks of a group that would be free if these requests were gone: those that nobody else holds."""
        held = Counter(block_id for request in requests for block_id in self._table(request, index))
        held.pop(NULL_BLOCK, None)
        pool = self.groups[index].pool
        return sum(pool.num_references(block_id) == count for block_id, count in held.items())

    def forget_all(self) -> None:
        """Drop every hash of all pools."""
        for group in self.groups:
            group.forget_all()

    def take_block_ops(self) -> tuple[BlockOps, ...]:
        """What the worker must move before the next forward, one entry a group."""
        return tuple(group.take_block_ops() for group in self.groups)

    def check_integrity(self, running: Sequence[Request], swapped: Sequence[Request] = ()) -> None:
        """Raises RuntimeError if the pools and the tables disagree. Between steps only: no moves may be pending."""
        for index, group in enumerate(self.groups):
            group.check_integrity(
                [self._table(request, index) for request in running],
                [request.host_tables[index] for request in swapped],
            )
        for request in running:
            for table in request.window_tables:
                if len(table) != len(request.block_ids):
                    raise RuntimeError(f"{request} has tables of {len(request.block_ids)} and {len(table)} blocks")

    def _table(self, request: Request, index: int) -> list[int]:
        if index == 0:
            return request.block_ids
        self._open_tables(request)
        return request.window_tables[index - 1]

    def _open_tables(self, request: Request) -> None:
        if len(request.window_tables) != len(self.groups) - 1:
            request.window_tables = [[] for _ in self.groups[1:]]

    # Names of contents.

    def _hashes(self, request: Request, count: int) -> list[bytes]:
        """Hashes of the first `count` full blocks; computed once, kept on the request."""
        hashes = request.block_hashes
        size = self.block_size
        parent = hashes[-1] if hashes else self._first_parent(request)
        for index in range(len(hashes), count):
            tokens = array("q", request.token_ids[index * size : (index + 1) * size])
            parent = hashlib.sha256(parent + tokens.tobytes()).digest()
            hashes.append(parent)
        return hashes[:count] if len(hashes) > count else hashes

    def _first_parent(self, request: Request) -> bytes:
        """The root, mixed with the request's extra keys, kind and value length-prefixed: none can pose as another."""
        if not request.cache_keys:
            return self._root_hash
        mixed = hashlib.sha256(self._root_hash)
        for text in (part for key in sorted(request.cache_keys.items()) for part in key):
            value = text.encode(errors="surrogatepass")
            mixed.update(len(value).to_bytes(8, "little") + value)
        return mixed.digest()
