"""Which blocks a request holds: prefix lookup, allocation, publication, freeing. Knows ids only, never memory."""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from isthmus.scheduler.block_pool import BlockPool
from isthmus.scheduler.output import NO_BLOCK_OPS, BlockOps
from isthmus.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Blocks of a request's beginning that are in the cache already, and the tokens they hold."""

    block_ids: tuple[int, ...] = ()
    num_cached_tokens: int = 0


NO_HIT = PrefixHit()


class KVCacheManager:
    """Block tables over one pool.

    Hashes: sha256 over (parent hash, extra keys, token ids), chained from a per-engine seed, so that equal hashes
    mean equal prefixes and nobody outside can construct a collision.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, *, enable_prefix_caching: bool = True, hash_seed: int | None = None
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        seed = secrets.token_bytes(32) if hash_seed is None else str(hash_seed).encode()
        self._root_hash = hashlib.sha256(b"isthmus-prefix\0" + seed).digest()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def reads_cache(self, request: Request) -> bool:
        """Whether the request may use cached blocks. One that wants prompt_logprobs never does: they have no logits."""
        return self.enable_prefix_caching and request.params.prompt_logprobs is None

    def lookup(self, request: Request) -> PrefixHit:
        """The longest cached prefix, at most num_tokens - 1 tokens: the last one must run to give logits."""
        if not self.reads_cache(request):
            return NO_HIT
        hit: list[int] = []
        for block_hash in self._hashes(request, (request.num_tokens - 1) // self.block_size):
            block_id = self.pool.find(block_hash)
            if block_id is None:
                break
            hit.append(block_id)
        return PrefixHit(tuple(hit), len(hit) * self.block_size)

    def can_allocate(self, request: Request, num_tokens: int, hit: PrefixHit, *, keep_free: int = 0) -> bool:
        """Whether the table may grow to `num_tokens` tokens, beginning with `hit`, leaving `keep_free` blocks."""
        new = self.num_blocks_for(num_tokens) - len(request.block_ids) - len(hit.block_ids)
        revived = sum(self.pool.is_free(block_id) for block_id in hit.block_ids)
        return new + revived + keep_free <= self.pool.num_free

    def allocate(self, request: Request, num_new_tokens: int, hit: PrefixHit = NO_HIT) -> list[int] | None:
        """Grow the table to hold computed (+ hit) + new tokens; all or nothing.

        Returns the blocks added (the hit's first, [] if the table was long enough), None if too few are free.
        """
        total = request.num_computed_tokens + hit.num_cached_tokens + num_new_tokens
        missing = -(-total // self.block_size) - len(request.block_ids) - len(hit.block_ids)
        if not hit.block_ids:
            if missing <= 0:
                return []
            if missing > self.pool.num_free:
                return None
        elif not self.can_allocate(request, total, hit):
            return None
        for block_id in hit.block_ids:
            self.pool.share(block_id)
        added = [*hit.block_ids, *self.pool.take(max(missing, 0))]
        request.block_ids.extend(added)
        request.num_published_blocks = max(request.num_published_blocks, len(hit.block_ids))
        return added

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
        """Give the table back, tail first: of one sequence the shared beginning stays longest in the LRU."""
        self.pool.release(reversed(request.block_ids))
        request.block_ids.clear()
        request.num_published_blocks = 0

    def take_block_ops(self) -> BlockOps:
        """Copies that the worker must do before the next forward."""
        return NO_BLOCK_OPS

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raises RuntimeError if the pool and the tables of `requests` disagree."""
        references: dict[int, int] = {}
        for request in requests:
            for block_id in request.block_ids:
                references[block_id] = references.get(block_id, 0) + 1
        self.pool.check_integrity(references)

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
