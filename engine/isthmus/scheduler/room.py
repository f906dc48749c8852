"""What there is room for: seats and blocks, and which of the free blocks are not for everyone."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.config import SchedulerConfig
from isthmus.scheduler.kv_cache_manager import KVCacheManager, PrefixHit
from isthmus.scheduler.pressure import Watermark
from isthmus.scheduler.request import Request
from isthmus.scheduler.stats import Shortage


class Room:
    """Answers for the requests that run now: `running` is the scheduler's own list."""

    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, watermark: Watermark, running: list[Request]
    ) -> None:
        self.max_num_seqs: int = config.max_num_seqs
        self._reserved_blocks = config.reserved_blocks
        self._kv = kv
        self._watermark = watermark
        self._running = running

    @property
    def has_seat(self) -> bool:
        """Whether one more request may run."""
        return len(self._running) < self.max_num_seqs

    def has_blocks(self, request: Request, hit: PrefixHit, *, leaving: Sequence[Request] = ()) -> bool:
        """Whether the blocks suffice for all of a request that begins with `hit`, once `leaving` are gone."""
        keep_free = self.keep_free(request, num_leaving=len(leaving))
        return self._kv.can_allocate(request, request.num_tokens, hit, keep_free=keep_free, leaving=leaving)

    def fits(self, request: Request) -> bool:
        """Whether there is a seat and blocks for a request that waits."""
        return self.has_seat and self.has_blocks(request, self._kv.lookup(request))

    # What is not for everyone.

    def keep_free(self, request: Request, *, num_leaving: int = 0) -> int:
        """Blocks that must stay free when the request comes in. The watermark is for those that run beside it, if any
        does once `num_leaving` are gone.
        """
        watermark = self._watermark.num_blocks if num_leaving < len(self._running) else 0
        return self.kept_for_system(request) + watermark

    def reserved_for_others(self, request: Request) -> int:
        """Blocks that the request can never have."""
        return 0 if request.is_system else self._reserved_blocks

    def kept_for_system(self, request: Request) -> int:
        """Of the reserve, what system requests do not hold yet: blocks to leave free for them."""
        reserved = self.reserved_for_others(request)
        if not reserved:
            return 0
        return max(reserved - sum(len(one.block_ids) for one in self._running if one.is_system), 0)

    def may_give_way_to(self, request: Request) -> list[Request]:
        """Blocks of a system request go back to the reserve, where they are of no use to others."""
        if not self._reserved_blocks or request.is_system:
            return self._running
        return [one for one in self._running if not one.is_system]

    def shortage(self, request: Request) -> Shortage:
        """What a waiting request takes and what there is, of the first block group that is short, else of the first."""
        kv, num_tokens, hit = self._kv, request.num_tokens, self._kv.lookup(request)
        first = Shortage(
            num_needed=kv.num_needed(request, num_tokens, hit),
            num_free=kv.pool.num_free,
            num_reserved=self.kept_for_system(request),
            num_watermark=self._watermark.num_blocks if self._running else 0,
        )
        others = (
            Shortage(kv.num_needed(request, num_tokens, hit, index), group.pool.num_free)
            for index, group in enumerate(kv.groups[1:], 1)
        )
        return next((shortage for shortage in (first, *others) if shortage.is_real), first)
