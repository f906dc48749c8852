"""Bugs of the block pools, the prefix cache, the host and the windows, to be planted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from isthmus.scheduler.block_group import BlockGroup
from isthmus.scheduler.block_pool import NULL_BLOCK, BlockPool
from isthmus.scheduler.kv_cache_manager import NO_HIT, KVCacheManager, PrefixHit
from isthmus.scheduler.request import Request

Plant = pytest.MonkeyPatch


def blocks_are_published_before_preemption_can_strike(plant: Plant) -> None:
    allocate = KVCacheManager.allocate

    def hasty(
        self: KVCacheManager, request: Request, num_new_tokens: int, hit: PrefixHit = NO_HIT, *, keep_free: int = 0
    ) -> list[int] | None:
        added = allocate(self, request, num_new_tokens, hit, keep_free=keep_free)
        if added is not None and hit is NO_HIT:
            self.publish(request, min(request.num_computed_tokens + num_new_tokens, request.num_tokens))
        return added

    plant.setattr(KVCacheManager, "allocate", hasty)


def block_is_published_before_it_is_full(plant: Plant) -> None:
    publish = KVCacheManager.publish

    def hasty(self: KVCacheManager, request: Request, num_valid_tokens: int) -> None:
        publish(self, request, min(num_valid_tokens + 1, request.num_tokens))

    plant.setattr(KVCacheManager, "publish", hasty)


def placeholders_are_published(plant: Plant) -> None:
    publish = KVCacheManager.publish

    def hasty(self: KVCacheManager, request: Request, num_valid_tokens: int) -> None:
        publish(self, request, request.num_computed_tokens)

    plant.setattr(KVCacheManager, "publish", hasty)


def hash_leaves_out_the_parent(plant: Plant) -> None:
    chained = KVCacheManager._hashes

    def unchained(self: KVCacheManager, request: Request, count: int) -> list[bytes]:
        hashes = []
        for index in range(count):
            tokens = request.token_ids[index * self.block_size : (index + 1) * self.block_size]
            block = Request("block", tokens, request.params)
            hashes += chained(self, block, 1)
        request.block_hashes[:] = hashes
        return hashes

    plant.setattr(KVCacheManager, "_hashes", unchained)


def hash_leaves_out_the_salt(plant: Plant) -> None:
    plant.setattr(KVCacheManager, "_first_parent", lambda self, request: self._root_hash)


def whole_sequence_may_be_a_hit(plant: Plant) -> None:
    lookup = KVCacheManager.lookup

    def greedy(self: KVCacheManager, request: Request) -> PrefixHit:
        request.token_ids.append(-1)
        hit = lookup(self, request)
        request.token_ids.pop()
        return hit

    plant.setattr(KVCacheManager, "lookup", greedy)


def hit_is_not_counted_as_a_reference(plant: Plant) -> None:
    share = BlockPool.share

    def free_only(self: BlockPool, block_id: int) -> None:
        if self.is_free(block_id):
            share(self, block_id)

    plant.setattr(BlockPool, "share", free_only)


def hit_stays_on_the_free_list(plant: Plant) -> None:
    def counting_only(self: BlockPool, block_id: int) -> None:
        self._ref_counts[block_id] += 1

    plant.setattr(BlockPool, "share", counting_only)


def shared_block_is_not_released(plant: Plant) -> None:
    release = BlockPool.release

    def reluctant(self: BlockPool, block_ids: Iterable[int]) -> None:
        release(self, [block_id for block_id in block_ids if self._ref_counts[block_id] == 1])

    plant.setattr(BlockPool, "release", reluctant)


def block_keeps_its_hash_when_handed_out(plant: Plant) -> None:
    plant.setattr(BlockPool, "_forget", lambda self, block_id: None)


def revived_hits_are_not_counted_as_taken(plant: Plant) -> None:
    plant.setattr(BlockGroup, "num_revived", lambda self, table: 0)


def victim_is_moved_in_the_wrong_order(plant: Plant) -> None:
    move = BlockGroup.move_to_host

    def jumbled(self: BlockGroup, table: Sequence[int]) -> list[int]:
        return move(self, table)[::-1]

    plant.setattr(BlockGroup, "move_to_host", jumbled)


def victim_keeps_its_device_blocks(plant: Plant) -> None:
    swap_out = KVCacheManager.swap_out

    def holding(self: KVCacheManager, request: Request) -> int | None:
        free = self._free_device
        self._free_device = lambda request: None  # type: ignore[method-assign]
        moved = swap_out(self, request)
        self._free_device = free  # type: ignore[method-assign]
        return moved

    plant.setattr(KVCacheManager, "swap_out", holding)


def host_blocks_leak_when_a_victim_comes_back(plant: Plant) -> None:
    swap_in = KVCacheManager.swap_in

    def leaky(self: KVCacheManager, request: Request, *, keep_free: int = 0) -> int | None:
        held = [(group, list(table)) for group, table in zip(self.groups, request.host_tables, strict=True)]
        moved = swap_in(self, request, keep_free=keep_free)
        for group, table in held if moved is not None else ():
            for host_id in set(table) - {NULL_BLOCK}:
                assert group.host_pool is not None
                group.host_pool.share(host_id)
        return moved

    plant.setattr(KVCacheManager, "swap_in", leaky)


def host_blocks_leak_when_a_victim_is_aborted(plant: Plant) -> None:
    plant.setattr(KVCacheManager, "free", lambda self, request: self._free_device(request))


def full_host_is_an_error(plant: Plant) -> None:
    num_free = BlockPool.num_free.fget
    assert num_free is not None
    swap_out = KVCacheManager.swap_out

    def hopeful(self: KVCacheManager, request: Request) -> int | None:
        with pytest.MonkeyPatch.context() as only_here:
            only_here.setattr(BlockPool, "num_free", property(lambda pool: num_free(pool) + 1))
            return swap_out(self, request)

    plant.setattr(KVCacheManager, "swap_out", hopeful)


def source_of_a_move_is_not_pinned(plant: Plant) -> None:
    plant.setattr(BlockGroup, "pin", lambda self, host_id: None)


def evicted_block_is_saved_in_name_only(plant: Plant) -> None:
    save = BlockGroup._save

    def nominal(self: BlockGroup, block_id: int, block_hash: bytes) -> None:
        before = list(self._swap_out)
        save(self, block_id, block_hash)
        self._swap_out = before

    plant.setattr(BlockGroup, "_save", nominal)


def evicted_block_is_saved_after_it_was_handed_out(plant: Plant) -> None:
    def late(self: BlockGroup, count: int) -> list[int]:
        lost = list(self.pool.next_to_lose(count)) if self._saves_evicted else []
        taken = self.pool.take(count)
        for (_, block_hash), block_id in zip(lost, reversed(taken), strict=False):
            self._save(block_id, block_hash)
        return taken

    plant.setattr(BlockGroup, "take", late)


def window_moves_on_too_early(plant: Plant) -> None:
    first_visible = BlockGroup.first_visible

    def early(self: BlockGroup, num_computed_tokens: int) -> int:
        return first_visible(self, num_computed_tokens) + (self.window is not None)

    plant.setattr(BlockGroup, "first_visible", early)


def window_never_moves_on(plant: Plant) -> None:
    plant.setattr(BlockGroup, "drop_unseen", lambda self, table, num_computed_tokens: None)


def window_hit_lacks_what_the_window_sees(plant: Plant) -> None:
    def lax(self: BlockGroup, hashes: Sequence[bytes], count: int) -> int:
        return next((end for end in range(count, 0, -1) if self._has(hashes[end - 1])), 0)

    plant.setattr(BlockGroup, "usable_hit", lax)


def partial_block_is_shared_instead_of_copied(plant: Plant) -> None:
    def copy_nothing(self: BlockGroup, source: int, target: int) -> None:
        return None

    plant.setattr(BlockGroup, "copy", copy_nothing)


def blocks_are_taken_from_a_leader_whose_window_moved_on(plant: Plant) -> None:
    def credulous(self: KVCacheManager, leader: Request, request: Request) -> bool:
        return len(leader.block_ids) * self.block_size >= request.num_tokens - 1 <= leader.num_computed_tokens

    plant.setattr(KVCacheManager, "_can_fork", credulous)


BUGS: tuple[Callable[[Plant], None], ...] = (
    blocks_are_published_before_preemption_can_strike,
    block_is_published_before_it_is_full,
    placeholders_are_published,
    hash_leaves_out_the_parent,
    hash_leaves_out_the_salt,
    whole_sequence_may_be_a_hit,
    hit_is_not_counted_as_a_reference,
    hit_stays_on_the_free_list,
    shared_block_is_not_released,
    block_keeps_its_hash_when_handed_out,
    revived_hits_are_not_counted_as_taken,
    victim_is_moved_in_the_wrong_order,
    victim_keeps_its_device_blocks,
    host_blocks_leak_when_a_victim_comes_back,
    host_blocks_leak_when_a_victim_is_aborted,
    full_host_is_an_error,
    source_of_a_move_is_not_pinned,
    evicted_block_is_saved_in_name_only,
    evicted_block_is_saved_after_it_was_handed_out,
    window_moves_on_too_early,
    window_never_moves_on,
    window_hit_lacks_what_the_window_sees,
    partial_block_is_shared_instead_of_copied,
    blocks_are_taken_from_a_leader_whose_window_moved_on,
)
