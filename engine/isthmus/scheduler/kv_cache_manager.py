"""Which blocks a request holds: prefix lookup, allocation, publication, freeing. Knows ids only, never memory."""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from isthmus.scheduler.block_pool import NULL_BLOCK, BlockPool
from isthmus.scheduler.output import NO_BLOCK_OPS, BlockOps
from isthmus.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A request's beginning that is in a cache already, and the tokens that it holds.

    block_ids: device blocks, the null block where the content is on the host.  from_host: (index in block_ids, host
    block) of those.  copy_from: the block that holds the tokens after those, to be copied before it is written to.
    """

    block_ids: tuple[int, ...] = ()
    num_cached_tokens: int = 0
    from_host: tuple[tuple[int, int], ...] = ()
    copy_from: int | None = None

    @property
    def num_on_device(self) -> int:
        return len(self.block_ids) - len(self.from_host)


NO_HIT = PrefixHit()


class KVCacheManager:
    """Block tables over the device's pool, and over the host's if there is one.

    Hashes: sha256 over (parent hash, extra keys, token ids), chained from a per-engine seed, so that equal hashes
    mean equal prefixes and nobody outside can construct a collision.

    The host pool holds the blocks of swapped requests, and as a second-level prefix cache the content of hashed blocks
    that the device handed out again. A step's moves are collected and taken once, by `take_block_ops`; until then host
    blocks that take part in one are pinned, so that none is both source and target, or a target twice.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        host_pool: BlockPool | None = None,
        enable_prefix_caching: bool = True,
        hash_seed: int | None = None,
    ) -> None:
        self.pool = pool
        self.host_pool = host_pool
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        seed = secrets.token_bytes(32) if hash_seed is None else str(hash_seed).encode()
        self._root_hash = hashlib.sha256(b"isthmus-prefix\0" + seed).digest()
        self._swap_out: list[tuple[int, int]] = []
        self._swap_in: list[tuple[int, int]] = []
        self._copy: list[tuple[int, int]] = []
        self._pinned: list[int] = []

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def reads_cache(self, request: Request) -> bool:
        """Whether the request may use cached blocks. One that wants prompt_logprobs never does: they have no logits."""
        return self.enable_prefix_caching and request.params.prompt_logprobs is None

    def lookup(self, request: Request) -> PrefixHit:
        """The longest cached prefix, at most num_tokens - 1 tokens: the last one must run to give logits."""
        if request.leader is not None and self._can_fork(request.leader, request):
            return self._fork(request.leader, request.num_tokens - 1)
        if not self.reads_cache(request):
            return NO_HIT
        hit: list[int] = []
        from_host: list[tuple[int, int]] = []
        host = self.host_pool
        for block_hash in self._hashes(request, (request.num_tokens - 1) // self.block_size):
            block_id = self.pool.find(block_hash)
            if block_id is None:
                on_host = None if host is None else host.find(block_hash)
                if on_host is None:
                    break
                from_host.append((len(hit), on_host))
                block_id = NULL_BLOCK
            hit.append(block_id)
        return PrefixHit(tuple(hit), len(hit) * self.block_size, tuple(from_host)) if hit else NO_HIT

    def _can_fork(self, leader: Request, request: Request) -> bool:
        return len(leader.block_ids) * self.block_size >= request.num_tokens - 1 <= leader.num_computed_tokens

    def _fork(self, leader: Request, num_tokens: int) -> PrefixHit:
        """The blocks of `leader` that hold `num_tokens` tokens: full ones shared, a last partial one copied. Its own
        table may differ from there on, since it is never written below `num_tokens`.
        """
        full, rest = divmod(num_tokens, self.block_size)
        copy_from = leader.block_ids[full] if rest else None
        return PrefixHit(tuple(leader.block_ids[:full]), num_tokens, copy_from=copy_from)

    def can_allocate(self, request: Request, num_tokens: int, hit: PrefixHit, *, keep_free: int = 0) -> bool:
        """Whether the table may grow to `num_tokens` tokens, beginning with `hit`, leaving `keep_free` blocks."""
        new = self.num_blocks_for(num_tokens) - len(request.block_ids) - hit.num_on_device
        revived = sum(self.pool.is_free(block_id) for block_id in hit.block_ids if block_id != NULL_BLOCK)
        return new + revived + keep_free <= self.pool.num_free

    def allocate(
        self, request: Request, num_new_tokens: int, hit: PrefixHit = NO_HIT, *, keep_free: int = 0
    ) -> list[int] | None:
        """Grow the table to hold computed (+ hit) + new tokens; all or nothing.

        Returns the blocks added (the hit's first, [] if the table was long enough), None if too few are free.
        """
        if hit.num_cached_tokens:
            return self._allocate_after(request, num_new_tokens, hit, keep_free)
        missing = -(-(request.num_computed_tokens + num_new_tokens) // self.block_size) - len(request.block_ids)
        if missing <= 0:
            return []
        if missing + keep_free > self.pool.num_free:
            return None
        added = self._take(missing)
        request.block_ids.extend(added)
        return added

    def _allocate_after(
        self, request: Request, num_new_tokens: int, hit: PrefixHit, keep_free: int
    ) -> list[int] | None:
        total = request.num_computed_tokens + hit.num_cached_tokens + num_new_tokens
        if not self.can_allocate(request, total, hit, keep_free=keep_free):
            return None
        # Whatever the hit is made of must be held before anything is taken, or it might be taken itself.
        added = list(hit.block_ids)
        for block_id in added:
            if block_id != NULL_BLOCK:
                self.pool.share(block_id)
        for _, host_id in hit.from_host:
            self._pin(host_id)
        hashes = self._hashes(request, len(added))
        for index, host_id in hit.from_host:
            (block_id,) = self._take(1)
            self._swap_in.append((host_id, block_id))
            self.pool.publish(block_id, hashes[index])
            added[index] = block_id
        taken = self._take(max(self.num_blocks_for(total) - len(request.block_ids) - len(added), 0))
        if hit.copy_from is not None:
            self._copy.append((hit.copy_from, taken[0]))
        added += taken
        request.block_ids.extend(added)
        request.num_published_blocks = max(request.num_published_blocks, len(hit.block_ids))
        return added

    def _take(self, count: int) -> list[int]:
        """Blocks of the device; the content that they lose goes to the host, if there is room and it is not there."""
        if self.host_pool is not None and self.enable_prefix_caching:
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

    def _pin(self, host_id: int) -> None:
        """Keep a host block until the step's moves are taken."""
        assert self.host_pool is not None
        self.host_pool.share(host_id)
        self._pinned.append(host_id)

    def swap_out(self, request: Request) -> int | None:
        """Move the request's computed blocks to the host and free its device blocks; the number moved.

        None, and nothing done, if the host has no room.
        """
        count = self.num_blocks_for(request.num_computed_tokens)
        if self.host_pool is None or count > self.host_pool.num_free:
            return None
        request.host_block_ids = self.host_pool.take(count)
        self._swap_out += zip(request.block_ids[:count], request.host_block_ids, strict=True)
        self._free_device(request)
        return count

    def swap_in(self, request: Request, *, keep_free: int = 0) -> int | None:
        """Bring a swapped request's blocks back, if the device has room for its whole sequence; the number moved.

        Blocks whose content the device still has are shared instead. None, and nothing done, without room.
        """
        assert self.host_pool is not None
        host_ids = request.host_block_ids
        found = self._still_on_device(request)
        hit = PrefixHit(tuple(found), len(found) * self.block_size)
        if not self.can_allocate(request, request.num_tokens, hit, keep_free=keep_free):
            return None
        for block_id in found:
            self.pool.share(block_id)
        taken = self._take(len(host_ids) - len(found))
        for host_id, block_id in zip(host_ids[len(found) :], taken, strict=True):
            self._pin(host_id)
            self._swap_in.append((host_id, block_id))
        self.host_pool.release(reversed(host_ids))
        request.block_ids = [*found, *taken]
        request.host_block_ids = []
        return len(taken)

    def _still_on_device(self, request: Request) -> list[int]:
        if not self.enable_prefix_caching:
            return []
        found: list[int] = []
        for block_hash in self._hashes(request, request.num_computed_tokens // self.block_size):
            block_id = self.pool.find(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_freed_by(self, requests: Iterable[Request]) -> int:
        """Blocks that would be free if all of these gave their tables back: those that nobody else holds."""
        held = Counter(block_id for request in requests for block_id in request.block_ids)
        return sum(self.pool.num_references(block_id) == count for block_id, count in held.items())

    def publish(self, request: Request, num_valid_tokens: int) -> None:
        """Index the blocks that the first `num_valid_tokens` tokens fill. Placeholders must not be counted in."""
        full = num_valid_tokens // self.block_size
        if full <= request.num_published_blocks or not self.enable_prefix_caching:
            return
        hashes = self._hashes(request, full)
        for index in range(request.num_published_blocks, full):
            self.pool.publish(request.block_ids[index], hashes[index])
        request.num_published_blocks = full

    def free(self, request: Request) -> None:
        """Give everything back, tail first: of one sequence the shared beginning stays longest in the LRU."""
        self._free_device(request)
        if request.host_block_ids and self.host_pool is not None:
            self.host_pool.release(reversed(request.host_block_ids))
            request.host_block_ids = []

    def _free_device(self, request: Request) -> None:
        self.pool.release(reversed(request.block_ids))
        request.block_ids.clear()
        request.num_published_blocks = 0

    def forget_all(self) -> None:
        """Drop every hash of both pools."""
        self.pool.forget_all()
        if self.host_pool is not None:
            self.host_pool.forget_all()

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

    def check_integrity(self, running: Iterable[Request], swapped: Iterable[Request] = ()) -> None:
        """Raises RuntimeError if the pools and the tables disagree. Between steps only: no moves may be pending."""
        self.pool.check_integrity(Counter(block_id for request in running for block_id in request.block_ids))
        if self.host_pool is not None:
            self.host_pool.check_integrity(Counter(b for request in swapped for b in request.host_block_ids))

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
        """The root, mixed with the request's extra keys, each tagged and length-prefixed: none can pose as another."""
        if request.cache_salt is None:
            return self._root_hash
        salt = request.cache_salt.encode()
        return hashlib.sha256(self._root_hash + b"salt" + len(salt).to_bytes(8, "little") + salt).digest()
